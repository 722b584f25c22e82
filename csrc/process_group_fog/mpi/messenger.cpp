#include "messenger.hpp"

#include <algorithm>
#include <cstring>

#include <c10/util/Exception.h>

namespace fog::mpi {
namespace {

// Messages handled in one poll: enough to empty a burst, few enough to look at everything else soon.
constexpr int kMessagesPerPoll = 16;

std::string error_text(int code) {
  char text[MPI_MAX_ERROR_STRING + 1] = {};
  int length = 0;
  api().Error_string(code, text, &length);
  return text;
}

} // namespace

Messenger::Messenger(Runtime& runtime, MessageHandler& handler)
    : runtime_(runtime), handler_(handler), local_(runtime.rank(), runtime.size()), next_tag_(runtime.size(), 0), incoming_(runtime.size()) {}

std::unique_ptr<Messenger::Buffer> Messenger::take_buffer() {
  if (buffers_.empty()) {
    return std::make_unique<Buffer>(sizeof(Header) + kInlineBytes);
  }
  auto buffer = std::move(buffers_.back());
  buffers_.pop_back();
  return buffer;
}

void Messenger::give_buffer(std::unique_ptr<Buffer> buffer) {
  constexpr size_t kKept = 64;
  if (buffers_.size() < kKept) {
    buffers_.push_back(std::move(buffer));
  }
}

void Messenger::track(MPI_Request request, Transfer transfer) {
  sending_ += transfer.outgoing ? 1 : 0;
  requests_.push_back(request);
  transfers_.push_back(std::move(transfer));
}

size_t Messenger::send(
    int destination, Header header, const void* data, const std::shared_ptr<TransferOwner>& owner, size_t token) {
  header.delivery = Delivery::kInline;
  const bool local = local_.reaches(destination);
  if (local && header.bytes <= kLocalInlineBytes) {
    local_.send(destination, header, data, header.bytes);
    return 0;
  }
  if (local && local_.read_by(destination)) {
    if (const auto offer = local_.offer(next_transfer_)) {
      header.delivery = Delivery::kOffer;
      header.address = reinterpret_cast<uintptr_t>(data);
      header.transfer = next_transfer_++;
      header.offer = *offer;
      offers_.emplace(header.transfer, Offer{owner, token, destination, *offer});
      local_.send(destination, header, nullptr, 0);
      return 1;
    }
  }
  const bool separate = header.bytes > kInlineBytes;
  if (separate) {
    // Tags from 1 up, one after the other: a receiver may take payloads of one sender in any order.
    next_tag_[destination] = next_tag_[destination] % static_cast<uint32_t>(runtime_.max_tag()) + 1;
    header.payload_tag = next_tag_[destination];
    header.delivery = Delivery::kPayload;
  }
  if (local) {
    local_.send(destination, header, nullptr, 0);
    return send_payload(destination, header, data, owner, token);
  }
  auto buffer = take_buffer();
  std::memcpy(buffer->data(), &header, sizeof(header));
  size_t length = sizeof(header);
  if (!separate && header.bytes > 0) {
    std::memcpy(buffer->data() + sizeof(header), data, header.bytes);
    length += header.bytes;
  }
  MPI_Request request = MPI_REQUEST_NULL;
  check(
      api().Isend(
          buffer->data(), static_cast<int>(length), MPI_BYTE, destination, kControlTag, runtime_.communicator(), &request),
      "MPI_Isend");
  int done = 0;
  check(api().Test(&request, &done, MPI_STATUS_IGNORE), "MPI_Test");
  if (done != 0) {
    give_buffer(std::move(buffer));
  } else {
    track(request, {std::move(buffer), nullptr, 0, true});
  }
  return separate ? send_payload(destination, header, data, owner, token) : 0;
}

size_t Messenger::send_payload(
    int destination, const Header& header, const void* data, const std::shared_ptr<TransferOwner>& owner, size_t token) {
  size_t segments = 0;
  const auto* bytes = static_cast<const char*>(data);
  for (size_t offset = 0; offset < header.bytes; offset += kSegmentBytes) {
    const auto count = static_cast<int>(std::min<size_t>(kSegmentBytes, header.bytes - offset));
    MPI_Request part = MPI_REQUEST_NULL;
    check(
        api().Isend(
            bytes + offset, count, MPI_BYTE, destination, static_cast<int>(header.payload_tag), runtime_.communicator(), &part),
        "MPI_Isend");
    track(part, {nullptr, owner, token, true});
    ++segments;
  }
  return segments;
}

size_t Messenger::receive(
    int source, const Header& header, void* data, const std::shared_ptr<TransferOwner>& owner, size_t token) {
  auto* bytes = static_cast<char*>(data);
  size_t segments = 0;
  for (size_t offset = 0; offset < header.bytes; offset += kSegmentBytes) {
    const auto count = static_cast<int>(std::min<size_t>(kSegmentBytes, header.bytes - offset));
    MPI_Request part = MPI_REQUEST_NULL;
    check(
        api().Irecv(
            bytes + offset, count, MPI_BYTE, source, static_cast<int>(header.payload_tag), runtime_.communicator(), &part),
        "MPI_Irecv");
    track(part, {nullptr, owner, token, false});
    ++segments;
  }
  return segments;
}

bool Messenger::take(int source, const Header& header) {
  const bool stands = local_.stands(source, header);
  Header taken;
  taken.kind = MessageKind::kTaken;
  taken.transfer = header.transfer;
  local_.send(source, taken, nullptr, 0);
  return stands;
}

template <typename Which>
void Messenger::drop_offers(Which&& which) {
  for (auto position = offers_.begin(); position != offers_.end();) {
    auto& offer = position->second;
    if (which(offer)) {
      local_.withdraw(offer.index);
      released_.push_back(std::move(offer.owner));
      position = offers_.erase(position);
    } else {
      ++position;
    }
  }
}

void Messenger::withdraw(const TransferOwner& owner) {
  drop_offers([&](const Offer& offer) { return offer.owner.get() == &owner; });
}

void Messenger::forget(int peer) {
  local_.forget(peer);
  drop_offers([&](const Offer& offer) { return offer.destination == peer; });
}

bool Messenger::poll() {
  bool progressed = local_.flush();
  progressed = local_.poll([this](int source, const Header& header, const char* data) { on_local(source, header, data); }) || progressed;
  if (must_poll()) {
    progressed = poll_messages() || progressed;
    progressed = poll_transfers() || progressed;
  }
  return progressed;
}

void Messenger::on_local(int source, const Header& header, const char* data) {
  if (header.kind != MessageKind::kTaken) {
    handler_.on_message(source, header, header.delivery == Delivery::kInline ? data : nullptr);
    return;
  }
  const auto found = offers_.find(header.transfer);
  if (found != offers_.end()) { // else it was withdrawn
    local_.withdraw(found->second.index);
    auto offer = std::move(found->second);
    offers_.erase(found);
    offer.owner->on_transfer(offer.token);
    released_.push_back(std::move(offer.owner));
  }
}

bool Messenger::poll_messages() {
  bool progressed = false;
  for (int handled = 0; handled < kMessagesPerPoll; ++handled) {
    int found = 0;
    MPI_Message message = MPI_MESSAGE_NULL;
    MPI_Status status;
    check(api().Improbe(MPI_ANY_SOURCE, kControlTag, runtime_.communicator(), &found, &message, &status), "MPI_Improbe");
    if (found == 0) {
      break;
    }
    progressed = true;
    int length = 0;
    check(api().Get_count(&status, MPI_BYTE, &length), "MPI_Get_count");
    const int source = status.MPI_SOURCE;
    auto buffer = take_buffer();
    TORCH_CHECK_WITH(
        DistBackendError, length >= static_cast<int>(sizeof(Header)) && length <= static_cast<int>(buffer->size()),
        "fog: a message of ", length, " bytes came from rank ", source, " of the world; is another build of fog running there?");
    MPI_Request request = MPI_REQUEST_NULL;
    check(api().Imrecv(buffer->data(), length, MPI_BYTE, &message, &request), "MPI_Imrecv");
    if (incoming_[source].empty()) {
      int done = 0;
      check(api().Test(&request, &done, MPI_STATUS_IGNORE), "MPI_Test");
      if (done != 0) {
        deliver(source, std::move(buffer));
        continue;
      }
      sources_waiting_.push_back(source);
    }
    incoming_[source].push_back({request, std::move(buffer)});
  }
  for (size_t i = 0; i < sources_waiting_.size();) {
    const int source = sources_waiting_[i];
    progressed = drain(source) || progressed;
    if (incoming_[source].empty()) {
      sources_waiting_[i] = sources_waiting_.back();
      sources_waiting_.pop_back();
    } else {
      ++i;
    }
  }
  return progressed;
}

// Delivers what has come from `source`, in the order in which it was sent.
bool Messenger::drain(int source) {
  bool progressed = false;
  auto& queue = incoming_[source];
  while (!queue.empty()) {
    int done = 0;
    check(api().Test(&queue.front().request, &done, MPI_STATUS_IGNORE), "MPI_Test");
    if (done == 0) {
      break;
    }
    auto buffer = std::move(queue.front().buffer);
    queue.pop_front();
    deliver(source, std::move(buffer));
    progressed = true;
  }
  return progressed;
}

void Messenger::deliver(int source, std::unique_ptr<Buffer> buffer) {
  Header header;
  std::memcpy(&header, buffer->data(), sizeof(header));
  handler_.on_message(source, header, header.delivery == Delivery::kInline ? buffer->data() + sizeof(header) : nullptr);
  give_buffer(std::move(buffer));
}

bool Messenger::poll_transfers() {
  if (requests_.empty()) {
    return false;
  }
  const int count = static_cast<int>(requests_.size());
  indices_.resize(requests_.size());
  statuses_.resize(requests_.size());
  int completed = 0;
  const int code = api().Testsome(count, requests_.data(), &completed, indices_.data(), statuses_.data());
  if (code != MPI_ERR_IN_STATUS) {
    check(code, "MPI_Testsome");
  }
  if (completed == MPI_UNDEFINED || completed == 0) {
    return false;
  }
  std::vector<std::pair<int, int>> done; // index and error
  done.reserve(completed);
  for (int i = 0; i < completed; ++i) {
    done.emplace_back(indices_[i], code == MPI_ERR_IN_STATUS ? statuses_[i].MPI_ERROR : MPI_SUCCESS);
  }
  std::sort(done.rbegin(), done.rend()); // from the back, so that filling a gap from there never moves one of these
  std::vector<std::pair<Transfer, int>> ended;
  ended.reserve(completed);
  for (const auto& [position, error] : done) {
    const auto index = static_cast<size_t>(position);
    ended.emplace_back(std::move(transfers_[index]), error);
    requests_[index] = requests_.back();
    requests_.pop_back();
    if (index + 1 < transfers_.size()) {
      transfers_[index] = std::move(transfers_.back());
    }
    transfers_.pop_back();
  }
  for (auto& [transfer, error] : ended) {
    sending_ -= transfer.outgoing ? 1 : 0;
    if (transfer.buffer) {
      give_buffer(std::move(transfer.buffer));
      continue;
    }
    if (error == MPI_SUCCESS) {
      transfer.owner->on_transfer(transfer.token);
    } else {
      transfer.owner->on_transfer_error(transfer.token, error_text(error));
    }
    released_.push_back(std::move(transfer.owner));
  }
  return true;
}

std::vector<std::shared_ptr<TransferOwner>> Messenger::take_released() {
  return std::exchange(released_, {});
}

} // namespace fog::mpi
