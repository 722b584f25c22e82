// Polling of MPI: arrived messages and completed transfers.
#include <algorithm>

#include "transport/mpi/messages.hpp"
#include "transport/mpi/messages_data.hpp"

namespace fog::mpi {
namespace {

// Messages handled in one poll: enough to empty a burst, and few enough to return to other work soon.
constexpr int kMessagesPerPoll = 16;

} // namespace

bool Messages::poll() {
  const auto begin = Clock::now();
  const bool messages = (!held_.empty() && send_held()) | poll_messages();
  const bool progressed = poll_transfers() || messages;
  if (in_parts()) { // other looks ask MPI for less
    moved_ = look_times_.has_moved(Clock::now() - begin);
  }
  return progressed;
}

bool Messages::poll_messages() {
  bool progressed = false;
  for (int handled = 0; handled < kMessagesPerPoll; ++handled) {
    int found = 0;
    MPI_Message message = MPI_MESSAGE_NULL;
    MPI_Status status;
    const auto probe = [&] { return api().Improbe(MPI_ANY_SOURCE, kControlTag, runtime_.communicator(), &found, &message, &status); };
    check(watchdog_.call("MPI_Improbe", -1, probe), "MPI_Improbe");
    if (found == 0) {
      break;
    }
    progressed = true;
    int length = 0;
    check(api().Get_count(&status, MPI_BYTE, &length), "MPI_Get_count");
    const PeerId source = status.MPI_SOURCE;
    if (length > static_cast<int>(sizeof(Header) + Transport::kInlineBytes)) {
      refuse_message(source, static_cast<size_t>(length), "it is longer than any");
    }
    auto& queue = arriving_[source];
    sources_waiting_.reserve(arriving_.size());
    queue.push_back({MPI_REQUEST_NULL, take_buffer(), static_cast<size_t>(length)}); // queued before MPI writes to it
    const auto receive = [&] { return api().Imrecv(queue.back().buffer->data(), length, MPI_BYTE, &message, &queue.back().request); };
    const int code = watchdog_.call("MPI_Imrecv", source, receive);
    if (code != MPI_SUCCESS) {
      queue.pop_back();
      check(code, "MPI_Imrecv");
    }
    if (queue.size() == 1) {
      drain(source);
      if (!queue.empty()) {
        sources_waiting_.push_back(source);
      }
    }
  }
  for (size_t i = 0; i < sources_waiting_.size();) {
    const PeerId source = sources_waiting_[i];
    progressed = drain(source) || progressed;
    if (arriving_[source].empty()) {
      sources_waiting_[i] = sources_waiting_.back();
      sources_waiting_.pop_back();
    } else {
      ++i;
    }
  }
  return progressed;
}

// Delivers the messages that have arrived from `source`, in the order in which they were sent.
bool Messages::drain(PeerId source) {
  bool progressed = false;
  auto& queue = arriving_[source];
  while (!queue.empty()) {
    if (!test(queue.front().request, source)) {
      break;
    }
    auto next = std::move(queue.front());
    queue.pop_front();
    const auto* record = next.buffer->data();
    const auto header = checked_header(source, record, next.length, false);
    handler_.on_message(source, header, header.delivery == Delivery::kInline ? record + sizeof(header) : nullptr);
    give_buffer(std::move(next.buffer));
    progressed = true;
  }
  return progressed;
}

bool Messages::poll_transfers() {
  if (requests_.empty()) {
    return false;
  }
  const int count = static_cast<int>(requests_.size());
  indices_.resize(requests_.size());
  statuses_.resize(requests_.size());
  done_.reserve(requests_.size()); // in advance: MPI reports a completion only once
  ended_.reserve(requests_.size());
  released_.reserve(released_.size() + requests_.size());
  int completed = 0;
  const int code = watchdog_.call(
      "MPI_Testsome", -1, [&] { return api().Testsome(count, requests_.data(), &completed, indices_.data(), statuses_.data()); });
  if (code != MPI_ERR_IN_STATUS) {
    check(code, "MPI_Testsome");
  }
  if (completed == MPI_UNDEFINED || completed == 0) {
    return false;
  }
  done_.clear();
  for (int i = 0; i < completed; ++i) {
    done_.emplace_back(indices_[i], code == MPI_ERR_IN_STATUS ? statuses_[i].MPI_ERROR : MPI_SUCCESS);
  }
  // from the back, so that moving the last entry into a gap never moves one of these
  std::sort(done_.rbegin(), done_.rend());
  for (const auto& [position, error] : done_) {
    const auto index = static_cast<size_t>(position);
    ended_.emplace_back(std::move(transfers_[index]), error);
    requests_[index] = requests_.back();
    requests_.pop_back();
    if (index + 1 < transfers_.size()) {
      transfers_[index] = std::move(transfers_.back());
    }
    transfers_.pop_back();
  }
  std::exception_ptr failure; // a failure of one owner must not keep the others from being told of theirs
  auto ended = std::move(ended_); // a part that ends may start another
  for (auto& [transfer, error] : ended) {
    sending_ -= !transfer.data || transfer.data->goes_out ? 1 : 0;
    parts_ -= transfer.is_data() ? 1 : 0;
    const auto text = error == MPI_SUCCESS ? std::string() : error_text(error);
    try {
      if (transfer.buffer) {
        unsent_[transfer.destination] -= transfer.buffer->size();
        give_buffer(std::move(transfer.buffer));
      } else if (transfer.ended) {
        transfer.ended(text);
      } else {
        transfer.data->on_part(transfer.part, text);
      }
    } catch (const std::exception&) {
      failure = std::current_exception();
    }
  }
  ended_ = std::move(ended);
  ended_.clear();
  if (failure) {
    std::rethrow_exception(failure);
  }
  return true;
}

} // namespace fog::mpi
