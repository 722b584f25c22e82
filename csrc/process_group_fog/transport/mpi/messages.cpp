#include "transport/mpi/messages.hpp"

#include <algorithm>
#include <cstring>

#include <c10/util/Exception.h>

#include "transport/shared_memory/shared_tensors.hpp"

namespace fog::mpi {
namespace {

// Messages handled in one poll: enough to empty a burst, few enough to look at everything else soon.
constexpr int kMessagesPerPoll = 16;
// Parts of one message's data that MPI has at a time: enough for the fastest link, few enough that looking after them costs little. They are
// so large that UCX's TCP brings them straight to their place; up to some 3 MB it sends eagerly and copies once more, which took 1.3 times
// as long for 16 MiB.
constexpr size_t kPartBytes = size_t(4) << 20;
constexpr size_t kPartsAtOnce = 4;

} // namespace

// Data that goes or comes in parts.
class Messages::Data : public std::enable_shared_from_this<Data> {
 public:
  Data(Messages& messages, PeerId peer, uint32_t tag, size_t bytes, const std::shared_ptr<TransferOwner>& owner, bool goes_out)
      : bytes(bytes), goes_out(goes_out), messages_(messages), peer_(peer), tag_(static_cast<int>(tag)), owner_(owner) {}
  virtual ~Data() = default;

  // Hands parts to MPI, as many as may be there.
  void start();
  void on_part(size_t part, const std::string& error);
  const std::shared_ptr<TransferOwner>& owner() const {
    return owner_;
  }
  void stop() {
    stopped_ = true;
  }

  const size_t bytes;
  const bool goes_out;

 protected:
  size_t parts() const {
    return (bytes + kPartBytes - 1) / kPartBytes;
  }
  // Where the next part is.
  virtual char* place_of(size_t part) = 0;
  virtual bool may_start(size_t part) const {
    return in_flight_ < kPartsAtOnce;
  }
  virtual const char* call_name() const = 0;
  virtual int call(char* place, int count, int peer, int tag, MPI_Comm comm, MPI_Request* request) = 0;
  virtual void on_complete(size_t part, const std::string& error) = 0;
  // MPI has no part of it any more, and gets none.
  virtual void on_end() {}
  bool is_complete() const {
    return in_flight_ == 0 && started_ == parts();
  }

  Messages& messages_;
  size_t started_ = 0; // parts
  size_t in_flight_ = 0;

 private:
  const PeerId peer_;
  const int tag_;
  std::shared_ptr<TransferOwner> owner_;
  bool stopped_ = false;
};

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
  try {
    start();
  } catch (const Unreachable&) { // whoever waits for it hears of the loss
    stop();
  } catch (const std::exception& failure) {
    if (messages_.watchdog_.broken()) {
      throw;
    }
    stop(); // it is this transfer's failure
    on_complete(part, message_of(failure));
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
    // MPI may call what it has taken sent: if it is to be held back that has to wait for the receiver.
    return (held_ ? api().Issend : api().Isend)(place, count, MPI_BYTE, peer, tag, comm, request);
  }
  void on_complete(size_t part, const std::string& error) override {
    if (error_.empty()) {
      error_ = error;
    }
  }
  void on_end() override {
    if (is_complete() || !error_.empty()) { // else it was withdrawn, or its receiver is lost: it has not been sent
      sent_(error_);
    }
  }

  const char* const data_;
  const bool held_;
  const Sent sent_;
  std::string error_;
};

// To its place, or through a few parts' memory where it is to be read.
class Messages::IncomingData final : public Data, public Incoming {
 public:
  IncomingData(Messages& messages, PeerId peer, const Header& header, void* place, const std::shared_ptr<TransferOwner>& owner)
      : Data(messages, peer, header.payload_tag, header.bytes, place != nullptr ? owner : nullptr, false),
        listener_(owner),
        place_(static_cast<char*>(place)),
        complete_(parts(), false),
        memory_parts_(place != nullptr ? parts() : std::min(parts(), kPartsAtOnce)) {
    messages.coming_.insert(this);
    if (place == nullptr) {
      memory_ = shared_allocator().allocate(std::min(bytes, memory_parts_ * kPartBytes));
    }
  }

  ~IncomingData() override {
    messages_.coming_.erase(this);
  }

  // If it is for `owner`, who reads nothing any more: what has been sent has to come all the same, or MPI would hold it for ever.
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
    while (come_ < complete_.size() && complete_[come_]) { // what has come without a gap
      ++come_;
    }
    if (const auto owner = listener_.lock()) {
      owner->on_progress();
    }
  }

  // The owner keeps this, so this keeps the owner only while MPI is at its memory.
  const std::weak_ptr<TransferOwner> listener_;
  char* const place_;
  std::vector<bool> complete_; // parts
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
  parts_ += transfer.data ? 1 : 0;
  requests_.push_back(request);
  transfers_.push_back(std::move(transfer));
}

void Messages::check_reachable(PeerId destination) const {
  if (handler_.has_ended(destination)) {
    throw Unreachable(destination);
  }
}

void Messages::send(PeerId destination, const Header& header, const void* data, size_t bytes) {
  auto buffer = take_buffer();
  std::memcpy(buffer->data(), &header, sizeof(header));
  if (bytes > 0) {
    std::memcpy(buffer->data() + sizeof(header), data, bytes);
  }
  const size_t length = sizeof(header) + bytes;
  MPI_Request request = MPI_REQUEST_NULL;
  make_room();
  auto& unsent = unsent_[destination];
  check_reachable(destination);
  const auto start = [&] {
    return api().Isend(
        buffer->data(), static_cast<int>(length), MPI_BYTE, mpi_rank(destination), kControlTag, runtime_.communicator(), &request);
  };
  check(watchdog_.call("MPI_Isend", destination, start), "MPI_Isend");
  const bool done = test(request, destination);
  if (done) {
    give_buffer(std::move(buffer));
  } else {
    unsent += buffer->size();
    track(request, {std::move(buffer), nullptr, 0, destination});
  }
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
    const std::shared_ptr<TransferOwner>& owner,
    Sent sent) {
  std::make_shared<OutgoingData>(*this, destination, tag, data, bytes, held, owner, std::move(sent))->start();
}

std::shared_ptr<Incoming> Messages::receive(
    PeerId source, const Header& header, void* place, const std::shared_ptr<TransferOwner>& owner) {
  auto data = std::make_shared<IncomingData>(*this, source, header, place, owner);
  data->start();
  return data;
}

void Messages::abandon(const TransferOwner& owner) {
  const auto all = coming_;
  for (auto* data : all) {
    data->drain_for(owner);
  }
}

bool Messages::poll() {
  const auto begin = Clock::now();
  const bool messages = poll_messages();
  const bool progressed = poll_transfers() || messages;
  moved_ = look_times_.has_moved(Clock::now() - begin);
  return progressed;
}

bool Messages::give_up() {
  if (std::exchange(given_up_, true)) {
    return false;
  }
  std::move(transfers_.begin(), transfers_.end(), std::back_inserter(lost_transfers_));
  transfers_.clear();
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
    queue.push_back({MPI_REQUEST_NULL, take_buffer(), static_cast<size_t>(length)}); // kept before MPI writes to it
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

// Delivers what has come from `source`, in the order in which it was sent.
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
  done_.reserve(requests_.size()); // now: MPI says once what is complete
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
  std::sort(done_.rbegin(), done_.rend()); // from the back, so that filling a gap from there never moves one of these
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
  std::exception_ptr failure; // that of one owner must not keep the others from hearing of theirs
  auto ended = std::move(ended_); // a part that ends may start another
  for (auto& [transfer, error] : ended) {
    sending_ -= !transfer.data || transfer.data->goes_out ? 1 : 0;
    try {
      if (transfer.buffer) {
        unsent_[transfer.destination] -= transfer.buffer->size();
        give_buffer(std::move(transfer.buffer));
      } else {
        --parts_;
        transfer.data->on_part(transfer.part, error == MPI_SUCCESS ? std::string() : error_text(error));
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
