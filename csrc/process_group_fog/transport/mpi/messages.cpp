#include "transport/mpi/messages.hpp"

#include <algorithm>
#include <cstring>

#include <c10/util/Exception.h>

#include "core/copy.hpp"
#include "transport/mpi/messages_data.hpp"
#include "transport/shared_memory/shared_tensors.hpp"

namespace fog::mpi {
void Messages::Data::start() {
  while (!stopped_ && started_ < parts() && may_start(started_)) {
    const size_t begin = started_ * kPartBytes;
    MPI_Request request = MPI_REQUEST_NULL;
    messages_.make_room();
    if (goes_out) {
      messages_.check_reachable(peer_);
    }
    const int code = messages_.watchdog_.call(call_name(), peer_, [&] {
      return call(
          place_of(started_), static_cast<int>(std::min(kPartBytes, bytes - begin)), messages_.mpi_rank(peer_), tag_,
          messages_.runtime_.communicator(), &request);
    });
    check(code, call_name());
    messages_.track(request, {nullptr, shared_from_this(), started_, -1});
    ++started_;
    ++in_flight_;
  }
}

void Messages::Data::on_part(size_t part, const std::string& error) {
  --in_flight_;
  on_complete(part, error);
  if (!error.empty()) {
    stop();
  }
  go_on();
}

void Messages::Data::go_on() {
  try {
    start();
  } catch (const Unreachable&) { // the waiting operation is told of the loss
    stop();
  } catch (const std::exception& failure) {
    if (messages_.watchdog_.broken()) {
      throw;
    }
    stop(); // the failure belongs to this transfer only
    on_complete(started_, message_of(failure));
  }
  if (in_flight_ == 0 && (started_ == parts() || stopped_)) {
    on_end();
    if (owner_) {
      messages_.released_.push_back(std::move(owner_)); // to be released without the lock
    }
  }
}

class Messages::OutgoingData final : public Data {
 public:
  OutgoingData(
      Messages& messages,
      PeerId peer,
      uint32_t tag,
      const void* data,
      size_t bytes,
      bool held,
      const std::shared_ptr<TransferOwner>& owner,
      Sent sent)
      : Data(messages, peer, tag, bytes, owner, true), data_(static_cast<const char*>(data)), held_(held), sent_(std::move(sent)) {}

 private:
  char* place_of(size_t part) override {
    return const_cast<char*>(data_) + part * kPartBytes;
  }
  const char* call_name() const override {
    return held_ ? "MPI_Issend" : "MPI_Isend";
  }
  int call(char* place, int count, int peer, int tag, MPI_Comm comm, MPI_Request* request) override {
    // MPI may report a message as sent once it has buffered it. A held message must wait for its receiver.
    return (held_ ? api().Issend : api().Isend)(place, count, MPI_BYTE, peer, tag, comm, request);
  }
  void on_complete(size_t part, const std::string& error) override {
    if (error_.empty()) {
      error_ = error;
    }
  }
  void on_end() override {
    // otherwise it was withdrawn or its receiver is lost, and it has not been sent
    if (is_complete() || !error_.empty()) {
      sent_(error_);
    }
  }

  const char* const data_;
  const bool held_;
  const Sent sent_;
  std::string error_;
};

// Data that is received directly into its place, or through memory of a few parts where the owner reads it.
class Messages::IncomingData final : public Data, public Incoming {
 public:
  IncomingData(Messages& messages, PeerId peer, const Header& header, void* place, const std::shared_ptr<TransferOwner>& owner)
      : Data(messages, peer, header.payload_tag, header.bytes, place != nullptr ? owner : nullptr, false),
        listener_(owner),
        place_(static_cast<char*>(place)),
        complete_(parts(), false),
        memory_parts_(place != nullptr ? parts() : std::min(parts(), kPartsAtOnce)) {
    if (place == nullptr) {
      memory_ = shared_allocator().allocate(std::min(bytes, memory_parts_ * kPartBytes));
    }
  }

  // If `owner`, which reads no more data, is the receiver: receives the rest of the data anyway, because MPI would keep
  // it forever.
  void drain_for(const TransferOwner& owner) {
    if (listener_.lock().get() == &owner && !draining_) {
      draining_ = true;
      start();
    }
  }

  size_t available() const override {
    return std::min(bytes, come_ * kPartBytes);
  }
  void read(size_t from, size_t to, std::vector<Block>& blocks) const override {
    while (from < to) {
      const size_t part = from / kPartBytes;
      const size_t end = std::min(to, (part + 1) * kPartBytes);
      blocks.push_back({from, end, memory_of(part) + from % kPartBytes});
      from = end;
    }
  }
  bool take(size_t bytes_taken) override {
    taken_ = bytes_taken;
    start();
    return true;
  }
  bool in_place() const override {
    return place_ != nullptr;
  }

 private:
  char* memory_of(size_t part) const {
    return place_ != nullptr ? place_ + part * kPartBytes : static_cast<char*>(memory_.get()) + part % memory_parts_ * kPartBytes;
  }
  char* place_of(size_t part) override {
    return memory_of(part);
  }
  bool may_start(size_t part) const override {
    return Data::may_start(part) && (draining_ || part < memory_parts_ || (part - memory_parts_ + 1) * kPartBytes <= taken_);
  }
  const char* call_name() const override {
    return "MPI_Irecv";
  }
  int call(char* place, int count, int peer, int tag, MPI_Comm comm, MPI_Request* request) override {
    return api().Irecv(place, count, MPI_BYTE, peer, tag, comm, request);
  }
  void on_complete(size_t part, const std::string& error_text) override {
    if (!error_text.empty()) {
      error = error_text;
    }
    complete_[part] = error_text.empty();
    while (come_ < complete_.size() && complete_[come_]) { // advance over the parts that have arrived without a gap
      ++come_;
    }
    if (const auto owner = listener_.lock()) {
      owner->on_progress();
    }
  }

  // A weak pointer, because the owner holds this object. This object holds the owner only while MPI accesses its
  // memory.
  const std::weak_ptr<TransferOwner> listener_;
  char* const place_;
  std::vector<bool> complete_; // by part
  size_t come_ = 0;
  const size_t memory_parts_;
  c10::DataPtr memory_;
  size_t taken_ = 0;
  bool draining_ = false;
};

Messages::Messages(Runtime& runtime, MessageHandler& handler, Watchdog& watchdog)
    : runtime_(runtime), handler_(handler), watchdog_(watchdog) {}

Messages::~Messages() = default;

std::unique_ptr<Messages::Buffer> Messages::take_buffer() {
  if (buffers_.empty()) {
    return std::make_unique<Buffer>(sizeof(Header) + Transport::kInlineBytes);
  }
  auto buffer = std::move(buffers_.back());
  buffers_.pop_back();
  return buffer;
}

void Messages::give_buffer(std::unique_ptr<Buffer> buffer) {
  constexpr size_t kKept = 64;
  if (buffers_.size() < kKept) {
    buffers_.push_back(std::move(buffer));
  }
}

void Messages::make_room() {
  if (transfers_.size() == transfers_.capacity() || requests_.size() == requests_.capacity()) {
    transfers_.reserve(2 * transfers_.size() + 16);
    requests_.reserve(2 * requests_.size() + 16);
  }
}

void Messages::track(MPI_Request request, Transfer transfer) {
  sending_ += !transfer.data || transfer.data->goes_out ? 1 : 0;
  parts_ += transfer.is_data() ? 1 : 0;
  requests_.push_back(request);
  transfers_.push_back(std::move(transfer));
}

void Messages::follow(MPI_Request request, bool large, Sent ended) {
  Transfer transfer;
  transfer.ended = std::move(ended);
  transfer.large = large;
  track(request, std::move(transfer));
}

void Messages::check_reachable(PeerId destination) const {
  if (handler_.has_ended(destination)) {
    throw Unreachable(destination);
  }
}

void Messages::send(PeerId destination, const Header& header, const void* data, size_t bytes) {
  auto buffer = take_buffer();
  std::memcpy(buffer->data(), &header, sizeof(header));
  copy_bytes(buffer->data() + sizeof(header), data, bytes);
  const size_t length = sizeof(header) + bytes;
  auto& unsent = unsent_[destination];
  const bool held = holds(destination);
  check_reachable(destination); // now, because holds() may have noticed its end
  if (held) {
    unsent += buffer->size();
    held_[destination].push_back({std::move(buffer), length, nullptr});
  } else {
    send_now(destination, std::move(buffer), length);
  }
}

void Messages::send_now(PeerId destination, std::unique_ptr<Buffer> buffer, size_t length) {
  MPI_Request request = MPI_REQUEST_NULL;
  make_room();
  const auto start = [&] {
    return api().Isend(
        buffer->data(), static_cast<int>(length), MPI_BYTE, mpi_rank(destination), kControlTag, runtime_.communicator(), &request);
  };
  check(watchdog_.call("MPI_Isend", destination, start), "MPI_Isend");
  const bool done = test(request, destination);
  if (done) {
    give_buffer(std::move(buffer));
  } else {
    unsent_[destination] += buffer->size();
    track(request, {std::move(buffer), nullptr, 0, destination});
  }
}

void Messages::start_or_hold(const std::shared_ptr<Data>& data) {
  if (holds(data->peer())) {
    held_[data->peer()].push_back({nullptr, 0, data});
  } else {
    data->start();
  }
}

bool Messages::send_held() {
  bool progressed = false;
  for (auto position = held_.begin(); position != held_.end();) {
    const PeerId destination = position->first;
    if (!handler_.may_send(destination)) {
      ++position;
      continue;
    }
    progressed = true;
    auto messages = std::move(position->second);
    position = held_.erase(position);
    for (auto& message : messages) {
      if (message.data) {
        message.data->go_on();
        continue;
      }
      unsent_[destination] -= message.buffer->size();
      if (handler_.has_ended(destination)) { // the waiting operation is told of the loss
        give_buffer(std::move(message.buffer));
      } else {
        send_now(destination, std::move(message.buffer), message.length);
      }
    }
  }
  return progressed;
}

uint32_t Messages::next_tag(PeerId destination) {
  auto& tag = tags_[destination];
  tag = tag % static_cast<uint32_t>(runtime_.max_tag()) + 1; // from 1 up
  return tag;
}

void Messages::send_data(
    PeerId destination,
    uint32_t tag,
    const void* data,
    size_t bytes,
    bool held,
    bool waits,
    const std::shared_ptr<TransferOwner>& owner,
    Sent sent) {
  auto outgoing = std::make_shared<OutgoingData>(*this, destination, tag, data, bytes, held, owner, std::move(sent));
  if (waits) {
    check_reachable(destination);
    deferred_.push_back(std::move(outgoing));
  } else {
    start_or_hold(outgoing);
  }
}

void Messages::go(const TransferOwner& owner, std::optional<PeerId> destination) {
  std::vector<std::shared_ptr<Data>> going;
  const auto goes = [&](const std::shared_ptr<Data>& data) {
    return data->owner().get() == &owner && (!destination || data->peer() == *destination);
  };
  std::copy_if(deferred_.begin(), deferred_.end(), std::back_inserter(going), goes);
  deferred_.erase(std::remove_if(deferred_.begin(), deferred_.end(), goes), deferred_.end());
  for (const auto& data : going) {
    if (holds(data->peer())) {
      held_[data->peer()].push_back({nullptr, 0, data});
    } else {
      data->go_on();
    }
  }
}

std::shared_ptr<Incoming> Messages::receive(
    PeerId source, const Header& header, void* place, const std::shared_ptr<TransferOwner>& owner) {
  auto data = std::make_shared<IncomingData>(*this, source, header, place, owner);
  if (coming_.size() == coming_.capacity()) {
    coming_.erase(std::remove_if(coming_.begin(), coming_.end(), [](const auto& each) { return each.expired(); }), coming_.end());
    coming_.reserve(2 * coming_.size() + 16);
  }
  coming_.push_back(data);
  data->start();
  return data;
}

void Messages::abandon(const TransferOwner& owner) {
  go(owner, std::nullopt); // the receivers may know of the data already, and MPI would keep their receives forever
  const auto all = coming_;
  for (const auto& each : all) {
    if (const auto data = each.lock()) {
      data->drain_for(owner);
    }
  }
}

bool Messages::give_up() {
  if (std::exchange(given_up_, true)) {
    return false;
  }
  std::move(transfers_.begin(), transfers_.end(), std::back_inserter(lost_transfers_));
  transfers_.clear();
  for (auto& data : deferred_) {
    lost_transfers_.push_back({nullptr, std::move(data), 0, -1});
  }
  deferred_.clear();
  for (auto& [peer, messages] : held_) {
    for (auto& message : messages) {
      lost_transfers_.push_back({std::move(message.buffer), std::move(message.data), 0, peer});
    }
  }
  held_.clear();
  requests_.clear();
  sources_waiting_.clear();
  sending_ = 0;
  parts_ = 0;
  return true;
}

bool Messages::test(MPI_Request& request, PeerId peer) {
  int done = 0;
  check(watchdog_.call("MPI_Test", peer, [&] { return api().Test(&request, &done, MPI_STATUS_IGNORE); }), "MPI_Test");
  return done != 0;
}

} // namespace fog::mpi
