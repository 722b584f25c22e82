#include "transport/tcp/channel.hpp"

#include <sys/socket.h>
#include <sys/uio.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <iterator>
#include <utility>

#include "transport/message.hpp"
#include "transport/shared_memory/shared_tensors.hpp"

namespace fog::tcp {
namespace {

// The bytes that one call writes or reads, so that other peers come in between.
constexpr size_t kMostAtOnce = size_t(1) << 20;
// A longer queue moves to the front of its memory when half of it has been sent, and keeps no memory when it is empty.
constexpr size_t kLongQueue = size_t(64) << 10;

bool is_for_later(int error) {
  return error == EAGAIN || error == EINTR || error == ENOBUFS || error == ENOMEM;
}

} // namespace

void Channel::append(const void* data, size_t bytes) {
  if (!closed_) {
    lines_.front().small.append(static_cast<const char*>(data), bytes);
  }
}

void Channel::queue(const Header& header, const void* data, size_t bytes) {
  auto& small = lines_.front().small;
  small.reserve(small.size() + sizeof(Frame) + sizeof(header) + bytes); // a message is queued as a whole or not at all
  put({Kind::kMessage, 0, sizeof(header) + bytes});
  append(&header, sizeof(header));
  if (bytes > 0) {
    append(data, bytes);
  }
}

void Channel::offer(std::shared_ptr<OutgoingData> data, size_t early) {
  if (closed_) {
    return;
  }
  offered_[data->tag] = data;
  if (early > 0) {
    data->room = std::min(early, data->bytes);
    data->going = true;
    early_ += sent_early_[data->tag] = data->room;
    going_.push_back(std::move(data));
  }
}

// The peer has asked for the data with that tag, or will not, so as much other data may go early.
void Channel::forget_early(uint32_t tag) {
  const auto found = sent_early_.find(tag);
  if (found == sent_early_.end()) {
    return;
  }
  early_ -= found->second;
  sent_early_.erase(found);
  if (const auto offered = offered_.find(tag); offered != offered_.end()) {
    const auto data = offered->second;
    if (has_left(*data)) {
      end(*data, !data->stopped);
    }
  }
}

std::string Channel::take_early(uint32_t tag) {
  const auto found = came_early_.find(tag);
  if (found == came_early_.end()) {
    return {};
  }
  auto early = std::move(found->second);
  came_early_.erase(found);
  bytes_came_early_ -= early.size();
  return early;
}

void Channel::expect(uint32_t tag, const std::shared_ptr<IncomingData>& data) {
  const auto early = take_early(tag);
  coming_[tag] = data;
  data->grant_room();
  take(tag, std::nullopt, early.data(), early.size());
}

void Channel::ignore(uint32_t tag) {
  if (came_early_.count(tag) > 0) {
    take_early(tag);
    ask(tag, 0);
  }
}

void Channel::ask(uint32_t tag, size_t room) {
  put({Kind::kAsk, tag, room});
}

// The data is not read any more.
void Channel::end(OutgoingData& data, bool sent) {
  const auto found = offered_.find(data.tag);
  const auto kept = found == offered_.end() ? nullptr : std::move(found->second); // `data` may be in the map only
  if (found != offered_.end()) {
    offered_.erase(found);
  }
  if (auto owner = std::move(data.owner)) {
    user_.release(std::move(owner));
  }
  if (const auto call = std::exchange(data.sent, nullptr); call && sent) {
    call("");
  }
}

void Channel::abandon(const TransferOwner& owner) {
  std::vector<std::shared_ptr<OutgoingData>> withdrawn;
  for (const auto& [tag, data] : offered_) {
    if (data->owner.get() == &owner) {
      withdrawn.push_back(data);
    }
  }
  for (const auto& data : withdrawn) {
    data->stopped = true;
    put({Kind::kWithdrawn, data->tag, 0});
    forget_early(data->tag);
    going_.erase(std::remove(going_.begin(), going_.end(), data), going_.end());
    for (auto& line : lines_) {
      if (line.part && line.part->data == data) {
        leave_part(line);
      }
    }
    end(*data, false);
  }
  for (auto position = coming_.begin(); position != coming_.end();) {
    const auto data = position->second.lock();
    if (data && !data->is_of(owner)) {
      ++position;
      continue;
    }
    put({Kind::kStop, position->first, 0});
    if (data) {
      data->withdraw(); // it asks for no more
      if (auto its = data->end()) {
        user_.release(std::move(its));
      }
    }
    position = coming_.erase(position);
  }
}

void Channel::close() {
  closed_ = true;
  going_.clear();
  came_early_.clear();
  bytes_came_early_ = 0;
  for (auto& line : lines_) {
    line.small = {};
    line.small_sent = 0;
    if (const auto part = std::exchange(line.part, nullptr); part && part->data->owner) {
      user_.release(std::move(part->data->owner));
    }
  }
  for (auto& [tag, data] : std::exchange(offered_, {})) {
    if (data->owner) {
      user_.release(std::move(data->owner));
    }
  }
  for (auto& [tag, expected] : std::exchange(coming_, {})) {
    const auto data = expected.lock();
    if (auto owner = data ? data->end() : nullptr) {
      user_.release(std::move(owner));
    }
  }
}

void Channel::add(bool sends) {
  auto& line = lines_.emplace_back();
  if (sends) {
    line.sender = ++senders_;
    put({Kind::kAdded, 0, 0});
  }
}

void Channel::finish() {
  for (auto& line : lines_) {
    if (line.sender > 0 && !std::exchange(line.finishes, true) && !line.part) {
      put_last(line);
    }
  }
}

void Channel::put_last(Line& line) {
  const Frame frame = {Kind::kLast, 0, 0};
  line.small.append(reinterpret_cast<const char*>(&frame), sizeof(frame));
}

bool Channel::wants_to_write(size_t number) const {
  const auto& line = lines_[number];
  return !closed_ && !mute_ && (line.unsent() > 0 || line.part || next_for(line) != going_.end());
}

bool Channel::wants_to_write() const {
  for (size_t number = 0; number < lines_.size(); ++number) {
    if (wants_to_write(number)) {
      return true;
    }
  }
  return false;
}

uint64_t Channel::written_by_all() const {
  uint64_t written = 0;
  for (const auto& line : lines_) {
    written += line.written;
  }
  return written;
}

std::deque<std::shared_ptr<OutgoingData>>::const_iterator Channel::next_for(const Line& line) const {
  const bool is_first = &line == &lines_.front();
  if (going_.empty() || (!is_first && (line.sender == 0 || line.sender > used_ || line.finishes))) {
    return going_.end();
  }
  // What the peer has asked for goes before what it has not. It knows the header of the former, so that may go by any.
  const auto asked = std::find_if(going_.begin(), going_.end(), [this](const auto& each) { return sent_early_.count(each->tag) == 0; });
  return asked == going_.end() && is_first ? going_.begin() : asked;
}

void Channel::next_part(Line& line) {
  const auto next = next_for(line);
  if (next == going_.end()) {
    return;
  }
  const auto data = *next;
  const size_t bytes = std::min(most_of_part_, data->room - data->begun);
  data->scattered = data->scattered || line.sender > 0;
  const std::array<Frame, 2> frames = {{{Kind::kAt, data->tag, data->begun}, {Kind::kPart, data->tag, bytes}}};
  line.part = std::make_unique<Part>(Part{frames, data->scattered ? size_t(0) : 1, data, data->data + data->begun, 0, nullptr});
  data->begun += bytes;
  ++data->parts;
  if (data->begun == data->room) {
    data->going = false;
    going_.erase(next);
  }
}

// The connection is done with its part.
std::unique_ptr<Channel::Part> Channel::take_part(Line& line) {
  if (line.finishes) {
    put_last(line);
  }
  --line.part->data->parts;
  return std::exchange(line.part, nullptr);
}

// The memory of the part may change from now on. A part that has begun goes to its end, as the peer expects its bytes.
void Channel::leave_part(Line& line) {
  auto& part = *line.part;
  if (part.sent == 0) {
    take_part(line);
    return;
  }
  const size_t bytes = part.bytes();
  const size_t sent = part.sent - std::min(part.sent, part.of_frames());
  part.copy = std::make_unique<char[]>(bytes);
  std::memcpy(part.copy.get() + sent, part.begin + sent, bytes - sent);
  part.begin = part.copy.get();
}

void Channel::on_part_sent(Line& line) {
  const auto part = take_part(line);
  auto& data = *part->data;
  if (data.stopped || has_left(data)) {
    end(data, !data.stopped);
  }
}

Channel::Result Channel::write(size_t number, int fd) {
  auto& line = lines_[number];
  size_t written = 0;
  while (wants_to_write(number) && written < kMostAtOnce) {
    if (!line.part) {
      next_part(line);
    }
    std::array<iovec, 3> pieces;
    size_t count = 0;
    const auto add = [&](const void* data, size_t bytes) {
      if (bytes > 0) {
        pieces[count++] = {const_cast<void*>(data), bytes};
      }
    };
    const bool part_first = line.part && line.part->sent > 0;
    const auto add_part = [&] {
      const auto& part = *line.part;
      const size_t of_frames = std::min(part.sent, part.of_frames());
      add(reinterpret_cast<const char*>(&part.frames[part.first]) + of_frames, part.of_frames() - of_frames);
      const size_t of_data = part.sent - of_frames;
      add(part.begin + of_data, part.bytes() - of_data);
    };
    if (part_first) {
      add_part();
    } else {
      add(line.small.data() + line.small_sent, line.unsent());
      if (line.part) {
        add_part();
      }
    }
    msghdr message = {};
    message.msg_iov = pieces.data();
    message.msg_iovlen = count;
    const auto sent = sendmsg(fd, &message, MSG_NOSIGNAL | MSG_DONTWAIT);
    if (sent < 0) {
      if (!is_for_later(errno)) { // what has come before the end is still to be read
        error_ = number == 0 ? errno : error_; // the first connection tells how the peer has ended
        mute_ = true;
      }
      break;
    }
    auto left = static_cast<size_t>(sent);
    written += left;
    line.written += left;
    if (!part_first) {
      const size_t small = std::min(left, line.unsent());
      line.small_sent += small;
      left -= small;
      if (line.unsent() == 0) {
        if (line.small.capacity() > kLongQueue) {
          line.small = {};
        }
        line.small.clear();
        line.small_sent = 0;
      } else if (line.small_sent > kLongQueue && line.small_sent > line.small.size() / 2) {
        line.small.erase(0, line.small_sent);
        line.small_sent = 0;
      }
    }
    if (line.part) {
      line.part->sent += left;
      if (line.part->sent == line.part->of_frames() + line.part->bytes()) {
        on_part_sent(line);
      }
    }
  }
  return written > 0 ? Result::kProgress : Result::kNothing;
}

Channel::Result Channel::read(size_t number, int fd) {
  auto& line = lines_[number];
  if (!line.buffer) {
    auto& spare = user_.spare_buffer();
    line.buffer = spare ? std::move(spare) : std::make_unique<char[]>(kBuffer);
  }
  parse(line); // what an exception has left there
  size_t come_in = 0;
  while (!closed_ && come_in < kMostAtOnce) {
    // A part goes to its place, and what follows it to the buffer. Bytes that nobody waits for go to the buffer too.
    std::shared_ptr<IncomingData> data;
    std::array<iovec, 2> pieces;
    size_t count = 0;
    size_t direct = 0;
    if (line.part_left > 0 && line.end == 0) {
      if (const auto found = coming_.find(line.part_tag); found != coming_.end()) {
        data = found->second.lock();
      }
      if (data) {
        const auto room = data->room(line.part_at);
        direct = std::min(room.bytes, line.part_left);
        if (direct == 0) {
          refuse_message(peer_, line.part_left, "there is no room for it");
        }
        pieces[count++] = {room.at, direct};
      }
    }
    if (!data || direct == line.part_left) {
      pieces[count++] = {line.buffer.get() + line.end, kBuffer - line.end};
    }
    const auto bytes = readv(fd, pieces.data(), static_cast<int>(count));
    if (bytes == 0 || (bytes < 0 && !is_for_later(errno))) {
      error_ = bytes < 0 && number == 0 ? errno : error_;
      if (line.end == 0) {
        line.buffer = nullptr;
      }
      return Result::kEnd;
    }
    if (bytes < 0) {
      break;
    }
    const auto got = static_cast<size_t>(bytes);
    come_in += got;
    const size_t placed = std::min(got, direct);
    if (placed > 0) {
      const auto at = line.part_at;
      line.pass(placed);
      come(line.part_tag, at, *data, placed);
    }
    line.end += got - placed;
    parse(line);
    size_t offered = 0;
    for (size_t i = 0; i < count; ++i) {
      offered += pieces[i].iov_len;
    }
    if (got < offered) { // the socket is empty; if not, the next look goes on
      break;
    }
  }
  if (line.end == 0) {
    user_.spare_buffer() = std::move(line.buffer);
  }
  return come_in > 0 ? Result::kProgress : Result::kNothing;
}

void Channel::parse(Line& line) {
  while (!closed_ && line.begin < line.end) {
    if (line.part_left > 0) {
      const size_t bytes = std::min(line.part_left, line.end - line.begin);
      const char* from = line.buffer.get() + line.begin;
      const auto at = line.part_at;
      line.begin += bytes;
      line.pass(bytes);
      take(line.part_tag, at, from, bytes);
      continue;
    }
    Frame frame;
    if (line.end - line.begin < sizeof(frame)) {
      break;
    }
    std::memcpy(&frame, line.buffer.get() + line.begin, sizeof(frame));
    const bool of_data = frame.kind == Kind::kAt || frame.kind == Kind::kPart || frame.kind == Kind::kLast;
    if (&line != &lines_.front() && !of_data) {
      refuse_message(peer_, sizeof(frame), "such a frame goes by the first connection only");
    }
    const bool is_message = frame.kind == Kind::kMessage;
    if (!is_message && frame.kind != Kind::kSigns) {
      line.begin += sizeof(frame);
      on_frame(line, frame);
      continue;
    }
    const size_t least = is_message ? sizeof(Header) : sizeof(Signs);
    if (frame.bytes < least || frame.bytes > least + (is_message ? Transport::kLocalInlineBytes : 0)) {
      refuse_message(peer_, frame.bytes, "it has another length than any");
    }
    if (line.end - line.begin < sizeof(frame) + frame.bytes) {
      break;
    }
    const char* record = line.buffer.get() + line.begin + sizeof(frame);
    line.begin += sizeof(frame) + frame.bytes;
    if (is_message) {
      user_.on_message(peer_, record, frame.bytes);
    } else {
      Signs signs;
      std::memcpy(&signs, record, sizeof(signs));
      user_.on_signs(peer_, signs);
    }
  }
  if (line.begin > 0) { // the beginning of a frame
    std::memmove(line.buffer.get(), line.buffer.get() + line.begin, line.end - line.begin);
    line.end -= line.begin;
    line.begin = 0;
  }
}

void Channel::on_frame(Line& line, const Frame& frame) {
  switch (frame.kind) {
    case Kind::kPart:
      line.part_tag = frame.tag;
      line.part_left = frame.bytes;
      line.part_at = std::exchange(line.next_at, std::nullopt);
      return;
    case Kind::kAt:
      line.next_at = frame.bytes;
      return;
    case Kind::kAdded:
      ++added_;
      return;
    case Kind::kLast:
      line.has_finished = true;
      ++finished_;
      return;
    case Kind::kAsk: {
      forget_early(frame.tag);
      const auto found = offered_.find(frame.tag);
      if (found == offered_.end()) { // it was withdrawn
        return;
      }
      auto& data = found->second;
      if (frame.bytes > data->bytes) {
        refuse_message(peer_, sizeof(frame), "it asks for more data than there is");
      }
      data->room = std::max(data->room, frame.bytes);
      if (!data->going && !data->stopped && data->room > data->begun) {
        data->going = true;
        going_.push_back(data);
      }
      return;
    }
    case Kind::kStop: {
      forget_early(frame.tag);
      const auto found = offered_.find(frame.tag);
      if (found == offered_.end()) {
        return;
      }
      const auto data = found->second;
      going_.erase(std::remove(going_.begin(), going_.end(), data), going_.end());
      data->bytes = data->begun; // it counts as sent
      if (data->parts == 0) {
        end(*data, true);
      }
      return;
    }
    case Kind::kWithdrawn: {
      const auto found = coming_.find(frame.tag);
      const auto data = found == coming_.end() ? nullptr : found->second.lock();
      if (found != coming_.end()) {
        coming_.erase(found);
      }
      take_early(frame.tag);
      if (data) {
        data->withdraw();
        if (auto owner = data->end()) {
          user_.release(std::move(owner));
        }
      }
      return;
    }
    case Kind::kAskForSigns:
      user_.on_ask(peer_);
      return;
    case Kind::kExpelled:
      user_.on_expelled(peer_);
      return;
    case Kind::kSigns:
    case Kind::kMessage:
      break;
  }
  refuse_message(peer_, sizeof(frame), "there is no such frame");
}

void Channel::take(uint32_t tag, std::optional<size_t> at, const char* from, size_t bytes) {
  while (bytes > 0) {
    const auto found = coming_.find(tag);
    const auto data = found == coming_.end() ? nullptr : found->second.lock();
    if (!data) { // it is early, or nobody waits for it any more
      if (const auto early = came_early_.find(tag); early != came_early_.end()) {
        if (bytes_came_early_ + bytes > kMostEarly) {
          refuse_message(peer_, bytes, "more data comes early than may");
        }
        early->second.append(from, bytes);
        bytes_came_early_ += bytes;
      }
      return;
    }
    const auto room = data->room(at);
    const size_t some = std::min(room.bytes, bytes);
    if (some == 0) {
      refuse_message(peer_, bytes, "there is no room for it");
    }
    std::memcpy(room.at, from, some);
    from += some;
    bytes -= some;
    come(tag, at, *data, some);
    if (at) {
      *at += some;
    }
  }
}

void Channel::come(uint32_t tag, std::optional<size_t> at, IncomingData& data, size_t bytes) {
  data.come(at, bytes);
  if (data.is_complete()) {
    coming_.erase(tag);
    if (auto owner = data.end()) {
      user_.release(std::move(owner));
    }
  }
  data.tell();
}

IncomingData::IncomingData(const Header& header, void* place, const std::shared_ptr<TransferOwner>& owner, Grant grant)
    : bytes_(header.bytes),
      place_(static_cast<char*>(place)),
      listener_(owner),
      owner_(place != nullptr ? owner : nullptr),
      grant_(std::move(grant)),
      capacity_(place != nullptr ? bytes_ : std::min(bytes_, kMemory)) {
  if (place == nullptr) {
    memory_ = shared_allocator().allocate(capacity_);
  }
}

void IncomingData::read(size_t from, size_t to, std::vector<Block>& blocks) const {
  const auto* memory = place_ != nullptr ? place_ : static_cast<const char*>(memory_.get());
  while (from < to) {
    const size_t at = from % capacity_;
    const size_t end = std::min(to, from - at + capacity_);
    blocks.push_back({from, end, memory + at});
    from = end;
  }
}

bool IncomingData::take(size_t bytes) {
  taken_ = bytes;
  grant_room();
  return !withdrawn_;
}

IncomingData::Room IncomingData::room(std::optional<size_t> at) const {
  auto* memory = place_ != nullptr ? place_ : static_cast<char*>(memory_.get());
  const size_t from = at.value_or(come_);
  const size_t position = from % capacity_;
  const size_t granted = from < come_ || from > granted_ ? 0 : granted_ - from;
  return {memory + position, std::min(granted, capacity_ - position)};
}

void IncomingData::come(std::optional<size_t> at, size_t bytes) {
  const size_t from = at.value_or(come_);
  if (from == come_) {
    come_ += bytes;
  } else if (const auto next = ahead_.upper_bound(from); next != ahead_.begin() && std::prev(next)->second == from) {
    std::prev(next)->second += bytes;
  } else {
    ahead_.emplace(from, from + bytes);
  }
  while (!ahead_.empty() && ahead_.begin()->first == come_) {
    come_ = ahead_.begin()->second;
    ahead_.erase(ahead_.begin());
  }
}

void IncomingData::tell() const {
  if (const auto owner = listener_.lock()) {
    owner->on_progress();
  }
}

void IncomingData::grant_room() {
  const size_t room = std::min(bytes_, taken_ + capacity_);
  // in steps of a quarter, so that few messages say so
  if (!withdrawn_ && room > granted_ && (room == bytes_ || room - granted_ >= capacity_ / 4)) {
    granted_ = room;
    grant_(room);
  }
}

} // namespace fog::tcp
