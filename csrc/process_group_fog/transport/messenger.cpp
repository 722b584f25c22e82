#include "transport/messenger.hpp"

#include <algorithm>
#include <cstring>

#include <c10/util/Exception.h>

namespace fog {
namespace {

// Messages handled in one poll: enough to empty a burst, few enough to look at everything else soon.
constexpr int kMessagesPerPoll = 16;
constexpr auto kPolledFurther = std::chrono::seconds(1);

[[noreturn]] void refuse(int source, size_t length, const char* why) {
  C10_THROW_ERROR(
      DistBackendError,
      c10::str(
          "fog: rank ", source, " of the world sent what is not a message of fog's, ", length, " bytes: ", why,
          ". Its memory is damaged?"));
}

// The header of a message of `length` bytes; throws if it cannot be one.
Header checked_header(int source, const char* record, size_t length, bool local) {
  if (length < sizeof(Header)) {
    refuse(source, length, "it is shorter than a header");
  }
  Header header;
  std::memcpy(&header, record, sizeof(header));
  if (const char* fault = fault_of(header, length - sizeof(header), local)) {
    refuse(source, length, fault);
  }
  return header;
}

} // namespace

Messenger::Messenger(Runtime& runtime, MessageHandler& handler, Watchdog& watchdog)
    : runtime_(runtime),
      handler_(handler),
      watchdog_(watchdog),
      local_(runtime.rank(), runtime.size()),
      waiting_(runtime.size()),
      reading_(runtime.size()),
      next_tag_(runtime.size(), 0),
      incoming_(runtime.size()),
      held_(runtime.size()),
      unsent_(runtime.size(), 0),
      offered_(runtime.size(), 0) {
  sources_waiting_.reserve(runtime.size());
}

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

void Messenger::make_room() {
  if (transfers_.size() == transfers_.capacity() || requests_.size() == requests_.capacity()) {
    transfers_.reserve(2 * transfers_.size() + 16);
    requests_.reserve(2 * requests_.size() + 16);
  }
}

void Messenger::track(MPI_Request request, Transfer transfer) {
  sending_ += transfer.outgoing ? 1 : 0;
  requests_.push_back(request);
  transfers_.push_back(std::move(transfer));
}

Messenger::Sent Messenger::send(
    int destination, Header header, const void* data, const std::shared_ptr<TransferOwner>& owner, size_t token, Way way) {
  header.delivery = Delivery::kInline;
  const bool local = local_.reaches(destination);
  // The order of messages between two ranks stays. News of failures and ends wait for nothing.
  const bool in_order = header.kind == MessageKind::kData || header.kind == MessageKind::kPointToPoint;
  const bool hold = in_order && header.bytes > 0 && holds_back(destination);
  if (local) {
    const bool inlined = header.bytes <= kLocalInlineBytes && !hold;
    const auto delivery = inlined || way == Way::kMessages ? std::nullopt : offered_as(destination, header, data);
    const bool queue = in_order && !waiting_[destination].empty();
    if (inlined && !queue) {
      local_.send(destination, header, data, header.bytes);
      return {};
    }
    if (delivery) {
      if (queue || !offer(destination, header, data, owner, token, *delivery)) {
        waiting_[destination].push_back({header, data, {}, owner, token});
        ++waiting_count_;
      }
      return {1, true};
    }
    if (inlined) {
      const auto* bytes = static_cast<const char*>(data);
      waiting_[destination].push_back({header, nullptr, {bytes, bytes + header.bytes}, nullptr, 0});
      ++waiting_count_;
      return {};
    }
  }
  const bool separate = header.bytes > kInlineBytes || hold;
  if (separate) {
    // Tags from 1 up, one after the other: a receiver may take payloads of one sender in any order.
    next_tag_[destination] = next_tag_[destination] % static_cast<uint32_t>(runtime_.max_tag()) + 1;
    header.payload_tag = next_tag_[destination];
    header.delivery = Delivery::kPayload;
  }
  if (local) {
    local_.send(destination, header, nullptr, 0);
    polled_until_ = Clock::now() + kPolledFurther;
    return {send_payload(destination, header, data, owner, token, hold), false};
  }
  auto buffer = take_buffer();
  std::memcpy(buffer->data(), &header, sizeof(header));
  size_t length = sizeof(header);
  if (!separate && header.bytes > 0) {
    std::memcpy(buffer->data() + sizeof(header), data, header.bytes);
    length += header.bytes;
  }
  MPI_Request request = MPI_REQUEST_NULL;
  make_room();
  check_reachable(destination);
  const auto start = [&] {
    return api().Isend(buffer->data(), static_cast<int>(length), MPI_BYTE, destination, kControlTag, runtime_.communicator(), &request);
  };
  check(watchdog_.call("MPI_Isend", destination, start), "MPI_Isend");
  const bool done = test(request, destination);
  if (done) {
    give_buffer(std::move(buffer));
  } else {
    unsent_[destination] += buffer->size();
    track(request, {std::move(buffer), nullptr, 0, true, 0, destination});
  }
  return {separate ? send_payload(destination, header, data, owner, token, hold) : 0, false};
}

void Messenger::check_reachable(int destination) const {
  if (handler_.has_ended(destination)) {
    throw Unreachable();
  }
}

std::optional<Delivery> Messenger::offered_as(int destination, const Header& header, const void* data) const {
  if (local_.mapped_by(destination, data, header.bytes)) {
    return Delivery::kMapped;
  }
  return local_.read_by(destination) ? std::make_optional(Delivery::kOffer) : std::nullopt;
}

bool Messenger::offer(
    int destination, Header header, const void* data, const std::shared_ptr<TransferOwner>& owner, size_t token, Delivery delivery) {
  constexpr size_t kShare = shared_memory::Inbox::kOffers / 2; // one that takes nothing leaves some to the others
  const auto offer = offered_[destination] < kShare ? local_.offer(next_transfer_) : std::nullopt;
  if (!offer) {
    return false;
  }
  ++offered_[destination];
  header.delivery = delivery;
  header.wants_confirm = 0; // that it was taken says as much
  header.address = reinterpret_cast<uintptr_t>(data);
  header.transfer = next_transfer_++;
  header.offer = *offer;
  offers_.emplace(header.transfer, Offer{owner, token, destination, *offer});
  local_.send(destination, header, nullptr, 0);
  return true;
}

bool Messenger::send_waiting() {
  bool any = false;
  for (int destination = 0; waiting_count_ > 0 && destination < static_cast<int>(waiting_.size()); ++destination) {
    auto& queue = waiting_[destination];
    while (!queue.empty()) {
      const auto& next = queue.front();
      if (!next.owner) {
        local_.send(destination, next.header, next.copy.data(), next.copy.size());
      } else if (!offer(
                     destination, next.header, next.data, next.owner, next.token, *offered_as(destination, next.header, next.data))) {
        break;
      }
      queue.pop_front();
      --waiting_count_;
      any = true;
    }
  }
  return any;
}

template <typename Which>
void Messenger::drop_waiting(Which&& which) {
  for (int destination = 0; waiting_count_ > 0 && destination < static_cast<int>(waiting_.size()); ++destination) {
    auto& queue = waiting_[destination];
    for (auto position = queue.begin(); position != queue.end();) {
      if (!which(destination, *position)) {
        ++position;
        continue;
      }
      if (position->owner) {
        released_.push_back(std::move(position->owner));
      }
      position = queue.erase(position);
      --waiting_count_;
    }
  }
}

// Calls start(offset, count, request) for each MPI message that `header`'s data comes in, and keeps track of it.
template <typename Start>
size_t Messenger::transfer(
    const Header& header, const std::shared_ptr<TransferOwner>& owner, size_t token, bool outgoing, const char* call, Start&& start) {
  const size_t most = part_bytes(header.bytes);
  size_t parts = 0;
  for (size_t offset = 0; offset < header.bytes; offset += most) {
    MPI_Request request = MPI_REQUEST_NULL;
    make_room();
    check(start(offset, static_cast<int>(std::min(most, header.bytes - offset)), &request), call);
    track(request, {nullptr, owner, token, outgoing, parts});
    ++parts;
  }
  return parts;
}

size_t Messenger::send_payload(
    int destination, const Header& header, const void* data, const std::shared_ptr<TransferOwner>& owner, size_t token, bool hold) {
  // MPI may call what it has taken sent: if it is to be held back that has to wait for the receiver.
  const auto isend = hold ? api().Issend : api().Isend;
  const char* const name = hold ? "MPI_Issend" : "MPI_Isend";
  return transfer(header, owner, token, true, name, [&](size_t offset, int count, MPI_Request* request) {
    check_reachable(destination);
    return watchdog_.call(name, destination, [&] {
      return isend(
          static_cast<const char*>(data) + offset, count, MPI_BYTE, destination, static_cast<int>(header.payload_tag),
          runtime_.communicator(), request);
    });
  });
}

size_t Messenger::receive(int source, const Header& header, void* data, const std::shared_ptr<TransferOwner>& owner, size_t token) {
  return transfer(header, owner, token, false, "MPI_Irecv", [&](size_t offset, int count, MPI_Request* request) {
    return watchdog_.call("MPI_Irecv", source, [&] {
      return api().Irecv(
          static_cast<char*>(data) + offset, count, MPI_BYTE, source, static_cast<int>(header.payload_tag), runtime_.communicator(),
          request);
    });
  });
}

size_t Stream::limit() const {
  size_t emptied = bytes;
  for (const auto& reader : readers) {
    emptied = std::min(emptied, reader.emptied);
  }
  return std::min(bytes, emptied + shared_memory::Inbox::kWindowBytes);
}

std::shared_ptr<Stream> Messenger::open_stream(
    const std::vector<int>& destinations, uint64_t group, const void* data, size_t bytes, const std::shared_ptr<TransferOwner>& owner) {
  if (bytes <= kLocalInlineBytes || destinations.empty()) {
    return nullptr;
  }
  const auto window = local_.take_window();
  if (!window) {
    return nullptr;
  }
  const auto offer = local_.offer(next_transfer_);
  if (!offer) {
    local_.give_window(*window);
    return nullptr;
  }
  auto stream = std::make_shared<Stream>();
  stream->data = static_cast<const char*>(data);
  stream->bytes = bytes;
  stream->window = local_.window(*window);
  for (const int rank : destinations) {
    stream->readers.push_back({rank});
  }
  stream->owner = owner;
  stream->group = group;
  stream->transfer = next_transfer_++;
  stream->offer_index = *offer;
  stream->window_index = *window;
  streams_.emplace(stream->transfer, stream);
  return stream;
}

void Messenger::announce(const Stream& stream, int destination, Header header) {
  header.delivery = Delivery::kStream;
  header.transfer = stream.transfer;
  header.offer = stream.offer_index;
  header.window = stream.window_index;
  local_.send(destination, header, nullptr, 0);
}

void Messenger::fill(const std::shared_ptr<Stream>& stream, size_t filled) {
  stream->filled = filled;
  if (streams_.count(stream->transfer) == 0) {
    return; // withdrawn
  }
  Header header;
  header.kind = MessageKind::kFilled;
  header.transfer = stream->transfer;
  header.bytes = filled;
  for (const auto& reader : stream->readers) {
    local_.send(reader.rank, header, nullptr, 0);
  }
}

void Messenger::close_stream(uint64_t transfer) {
  const auto found = streams_.find(transfer);
  const auto stream = found->second;
  streams_.erase(found);
  stream->closed = true;
  local_.withdraw(stream->offer_index);
  if (!stream->filling) {
    local_.give_window(stream->window_index);
  }
}

void Messenger::end_filling(Stream& stream) {
  stream.filling = false;
  if (stream.closed) { // meanwhile
    local_.give_window(stream.window_index);
  }
}

template <typename Which>
void Messenger::close_streams(Which&& which) {
  for (auto position = streams_.begin(); position != streams_.end();) {
    const auto next = std::next(position); // stays where it is
    if (which(*position->second)) {
      close_stream(position->first);
    }
    position = next;
  }
}

void Messenger::read_stream(int source, const Header& header, const std::shared_ptr<TransferOwner>& owner, size_t token) {
  auto& reading = reading_[source][header.transfer];
  if (reading.filled > header.bytes) {
    reading_[source].erase(header.transfer);
    refuse(source, sizeof(header), "a stream has more data than was announced");
  }
  reading.bytes = header.bytes;
  reading.owner = owner;
  reading.token = token;
  if (reading.filled > 0) {
    owner->on_filled(token, reading.filled);
  }
}

bool Messenger::empty(int source, const Header& header, size_t emptied) {
  const bool stands = local_.stands(source, header);
  Header message;
  message.kind = MessageKind::kEmptied;
  message.transfer = header.transfer;
  message.bytes = emptied;
  local_.send(source, message, nullptr, 0);
  if (emptied == header.bytes) {
    reading_[source].erase(header.transfer);
  }
  return stands;
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
      --offered_[offer.destination];
      released_.push_back(std::move(offer.owner)); // first, as there may be no memory for it
      local_.withdraw(offer.index);
      position = offers_.erase(position);
    } else {
      ++position;
    }
  }
}

void Messenger::withdraw(const TransferOwner& owner) {
  drop_waiting([&](int, const Waiting& waiting) { return waiting.owner.get() == &owner; });
  drop_offers([&](const Offer& offer) { return offer.owner.get() == &owner; });
  close_streams([&](const Stream& stream) { return stream.owner.lock().get() == &owner; });
  for (auto& readings : reading_) {
    for (auto reading = readings.begin(); reading != readings.end();) {
      reading = reading->second.owner.lock().get() == &owner ? readings.erase(reading) : std::next(reading);
    }
  }
}

void Messenger::withdraw_group(uint64_t group) {
  close_streams([&](const Stream& stream) { return stream.group == group; });
}

void Messenger::forget(int peer, uint64_t group) {
  for (const auto& [transfer, stream] : streams_) {
    for (auto& reader : stream->readers) {
      if (reader.rank == peer && (group == 0 || stream->group == group)) {
        reader.emptied = stream->bytes;
        if (const auto owner = stream->owner.lock()) {
          owner->on_room();
        }
      }
    }
  }
  close_streams([](const Stream& stream) { return stream.emptied(); });
}

void Messenger::forget(int peer) {
  local_.forget(peer);
  drop_waiting([&](int destination, const Waiting&) { return destination == peer; });
  drop_offers([&](const Offer& offer) { return offer.destination == peer; });
  forget(peer, 0);
}

bool Messenger::poll() {
  bool progressed = local_.flush();
  progressed = send_waiting() || progressed;
  progressed = local_.poll([this](int source, const char* record, size_t length) { on_local(source, record, length); }) || progressed;
  if (must_poll()) {
    progressed = poll_messages() || progressed;
    progressed = poll_transfers() || progressed;
  }
  return progressed;
}

bool Messenger::give_up_mpi() {
  if (std::exchange(given_up_, true)) {
    return false;
  }
  std::move(transfers_.begin(), transfers_.end(), std::back_inserter(lost_transfers_));
  transfers_.clear();
  requests_.clear();
  sources_waiting_.clear();
  sending_ = 0;
  return true;
}

bool Messenger::test(MPI_Request& request, int peer) {
  int done = 0;
  check(watchdog_.call("MPI_Test", peer, [&] { return api().Test(&request, &done, MPI_STATUS_IGNORE); }), "MPI_Test");
  return done != 0;
}

void Messenger::on_local(int source, const char* record, size_t length) {
  const auto header = checked_header(source, record, length, true);
  switch (header.kind) {
    case MessageKind::kTaken:
      on_taken(header);
      break;
    case MessageKind::kFilled: {
      auto& reading = reading_[source][header.transfer]; // may come before anybody reads it
      if (header.bytes > reading.bytes) {
        refuse(source, length, "a stream has more data than was announced");
      }
      reading.filled = header.bytes;
      if (const auto owner = reading.owner.lock()) {
        owner->on_filled(reading.token, reading.filled);
      }
      break;
    }
    case MessageKind::kEmptied:
      on_emptied(source, header);
      break;
    default:
      handler_.on_message(source, header, header.delivery == Delivery::kInline ? record + sizeof(header) : nullptr);
  }
}

void Messenger::on_emptied(int source, const Header& header) {
  const auto found = streams_.find(header.transfer);
  if (found == streams_.end()) {
    return; // it was withdrawn
  }
  const auto stream = found->second;
  if (header.bytes > stream->bytes) {
    refuse(source, sizeof(header), "more of a stream was read than it has");
  }
  for (auto& reader : stream->readers) {
    if (reader.rank == source) {
      reader.emptied = header.bytes;
    }
  }
  if (stream->emptied()) {
    close_stream(header.transfer);
  } else if (const auto owner = stream->owner.lock()) {
    owner->on_room();
  }
}

void Messenger::on_taken(const Header& header) {
  const auto found = offers_.find(header.transfer);
  if (found != offers_.end()) { // else it was withdrawn
    local_.withdraw(found->second.index);
    auto offer = std::move(found->second);
    offers_.erase(found);
    --offered_[offer.destination];
    offer.owner->on_transfer(offer.token, 0);
    released_.push_back(std::move(offer.owner));
  }
}

bool Messenger::poll_messages() {
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
    const int source = status.MPI_SOURCE;
    if (length > static_cast<int>(sizeof(Header) + kInlineBytes)) {
      refuse(source, static_cast<size_t>(length), "it is longer than any");
    }
    auto& queue = incoming_[source];
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
    if (!test(queue.front().request, source)) {
      break;
    }
    auto next = std::move(queue.front());
    queue.pop_front();
    deliver(source, std::move(next.buffer), next.length);
    progressed = true;
  }
  return progressed;
}

void Messenger::deliver(int source, std::unique_ptr<Buffer> buffer, size_t length) {
  const auto header = checked_header(source, buffer->data(), length, false);
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
  done_.reserve(requests_.size()); // now: MPI says once what is complete
  ended_.reserve(requests_.size());
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
  for (auto& [transfer, error] : ended_) {
    sending_ -= transfer.outgoing ? 1 : 0;
    try {
      if (transfer.buffer) {
        unsent_[transfer.destination] -= transfer.buffer->size();
        give_buffer(std::move(transfer.buffer));
        continue;
      }
      released_.push_back(transfer.owner);
      if (error == MPI_SUCCESS) {
        transfer.owner->on_transfer(transfer.token, transfer.part);
      } else {
        transfer.owner->on_transfer_error(transfer.token, error_text(error));
      }
    } catch (const std::exception&) {
      failure = std::current_exception();
    }
  }
  ended_.clear();
  if (failure) {
    std::rethrow_exception(failure);
  }
  return true;
}

std::vector<std::shared_ptr<TransferOwner>> Messenger::take_released() {
  return std::exchange(released_, {});
}

} // namespace fog
