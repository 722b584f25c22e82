#include "transport/tcp/channel.hpp"

#include <sys/socket.h>
#include <sys/uio.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
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
    small_.append(static_cast<const char*>(data), bytes);
  }
}

void Channel::queue(const Header& header, const void* data, size_t bytes) {
  small_.reserve(small_.size() + sizeof(Frame) + sizeof(header) + bytes); // a message is queued as a whole or not at all
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
    if (data->begun == data->bytes && (!part_ || part_->data != data)) {
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
  take(tag, early.data(), early.size());
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
    if (part_ && part_->data == data) {
      leave_part();
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
  small_ = {};
  small_sent_ = 0;
  going_.clear();
  came_early_.clear();
  bytes_came_early_ = 0;
  if (const auto part = std::exchange(part_, nullptr); part && part->data->owner) {
    user_.release(std::move(part->data->owner));
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

void Channel::next_part() {
  if (going_.empty()) {
    return;
  }
  // What the peer has asked for goes before what it has not.
  const auto asked = std::find_if(going_.begin(), going_.end(), [this](const auto& each) { return sent_early_.count(each->tag) == 0; });
  const auto next = asked == going_.end() ? going_.begin() : asked;
  const auto data = *next;
  const size_t bytes = std::min(most_of_part_, data->room - data->begun);
  part_ = std::make_unique<Part>(Part{{Kind::kPart, data->tag, bytes}, data, data->data + data->begun, 0, nullptr});
  data->begun += bytes;
  if (data->begun == data->room) {
    data->going = false;
    going_.erase(next);
  }
}

// The memory of the part may change from now on. A part that has begun goes to its end, as the peer expects its bytes.
void Channel::leave_part() {
  if (part_->sent == 0) {
    part_ = nullptr;
    return;
  }
  const size_t bytes = part_->frame.bytes;
  const size_t sent = part_->sent - std::min(part_->sent, sizeof(Frame));
  part_->copy = std::make_unique<char[]>(bytes);
  std::memcpy(part_->copy.get() + sent, part_->begin + sent, bytes - sent);
  part_->begin = part_->copy.get();
}

void Channel::on_part_sent() {
  const auto part = std::exchange(part_, nullptr);
  auto& data = *part->data;
  if (data.stopped || (data.begun == data.bytes && sent_early_.count(data.tag) == 0)) {
    end(data, !data.stopped);
  }
}

Channel::Result Channel::write(int fd) {
  size_t written = 0;
  while (wants_to_write() && written < kMostAtOnce) {
    if (!part_) {
      next_part();
    }
    std::array<iovec, 3> pieces;
    size_t count = 0;
    const auto add = [&](const void* data, size_t bytes) {
      if (bytes > 0) {
        pieces[count++] = {const_cast<void*>(data), bytes};
      }
    };
    const bool part_first = part_ && part_->sent > 0;
    const auto add_part = [&] {
      const size_t of_frame = std::min(part_->sent, sizeof(Frame));
      add(reinterpret_cast<const char*>(&part_->frame) + of_frame, sizeof(Frame) - of_frame);
      const size_t of_data = part_->sent - of_frame;
      add(part_->begin + of_data, part_->frame.bytes - of_data);
    };
    if (part_first) {
      add_part();
    } else {
      add(small_.data() + small_sent_, unsent());
      if (part_) {
        add_part();
      }
    }
    msghdr message = {};
    message.msg_iov = pieces.data();
    message.msg_iovlen = count;
    const auto sent = sendmsg(fd, &message, MSG_NOSIGNAL | MSG_DONTWAIT);
    if (sent < 0) {
      if (!is_for_later(errno)) { // what has come before the end is still to be read
        error_ = errno;
        small_.clear();
        small_sent_ = 0;
        going_.clear();
        part_ = nullptr;
        return Result::kNothing;
      }
      break;
    }
    auto left = static_cast<size_t>(sent);
    written += left;
    written_ += left;
    if (!part_first) {
      const size_t small = std::min(left, unsent());
      small_sent_ += small;
      left -= small;
      if (unsent() == 0) {
        if (small_.capacity() > kLongQueue) {
          small_ = {};
        }
        small_.clear();
        small_sent_ = 0;
      } else if (small_sent_ > kLongQueue && small_sent_ > small_.size() / 2) {
        small_.erase(0, small_sent_);
        small_sent_ = 0;
      }
    }
    if (part_) {
      part_->sent += left;
      if (part_->sent == sizeof(Frame) + part_->frame.bytes) {
        on_part_sent();
      }
    }
  }
  return written > 0 ? Result::kProgress : Result::kNothing;
}

Channel::Result Channel::read(int fd) {
  if (!buffer_) {
    auto& spare = user_.spare_buffer();
    buffer_ = spare ? std::move(spare) : std::make_unique<char[]>(kBuffer);
  }
  parse(); // what an exception has left there
  size_t come_in = 0;
  while (!closed_ && come_in < kMostAtOnce) {
    // A part goes to its place, and what follows it to the buffer. Bytes that nobody waits for go to the buffer too.
    std::shared_ptr<IncomingData> data;
    std::array<iovec, 2> pieces;
    size_t count = 0;
    size_t direct = 0;
    if (part_left_ > 0 && end_ == 0) {
      if (const auto found = coming_.find(part_tag_); found != coming_.end()) {
        data = found->second.lock();
      }
      if (data) {
        const auto room = data->room();
        direct = std::min(room.bytes, part_left_);
        if (direct == 0) {
          refuse_message(peer_, part_left_, "there is no room for it");
        }
        pieces[count++] = {room.at, direct};
      }
    }
    if (!data || direct == part_left_) {
      pieces[count++] = {buffer_.get() + end_, kBuffer - end_};
    }
    const auto bytes = readv(fd, pieces.data(), static_cast<int>(count));
    if (bytes == 0 || (bytes < 0 && !is_for_later(errno))) {
      error_ = bytes < 0 ? errno : error_;
      return Result::kEnd;
    }
    if (bytes < 0) {
      break;
    }
    const auto got = static_cast<size_t>(bytes);
    come_in += got;
    const size_t placed = std::min(got, direct);
    if (placed > 0) {
      part_left_ -= placed;
      come(part_tag_, *data, placed);
    }
    end_ += got - placed;
    parse();
    size_t offered = 0;
    for (size_t i = 0; i < count; ++i) {
      offered += pieces[i].iov_len;
    }
    if (got < offered) { // the socket is empty; if not, the next look goes on
      break;
    }
  }
  if (end_ == 0) {
    user_.spare_buffer() = std::move(buffer_);
  }
  return come_in > 0 ? Result::kProgress : Result::kNothing;
}

void Channel::parse() {
  while (!closed_ && begin_ < end_) {
    if (part_left_ > 0) {
      const size_t bytes = std::min(part_left_, end_ - begin_);
      const char* from = buffer_.get() + begin_;
      begin_ += bytes;
      part_left_ -= bytes;
      take(part_tag_, from, bytes);
      continue;
    }
    Frame frame;
    if (end_ - begin_ < sizeof(frame)) {
      break;
    }
    std::memcpy(&frame, buffer_.get() + begin_, sizeof(frame));
    const bool is_message = frame.kind == Kind::kMessage;
    if (!is_message && frame.kind != Kind::kSigns) {
      begin_ += sizeof(frame);
      on_frame(frame);
      continue;
    }
    const size_t least = is_message ? sizeof(Header) : sizeof(Signs);
    if (frame.bytes < least || frame.bytes > least + (is_message ? Transport::kLocalInlineBytes : 0)) {
      refuse_message(peer_, frame.bytes, "it has another length than any");
    }
    if (end_ - begin_ < sizeof(frame) + frame.bytes) {
      break;
    }
    const char* record = buffer_.get() + begin_ + sizeof(frame);
    begin_ += sizeof(frame) + frame.bytes;
    if (is_message) {
      user_.on_message(peer_, record, frame.bytes);
    } else {
      Signs signs;
      std::memcpy(&signs, record, sizeof(signs));
      user_.on_signs(peer_, signs);
    }
  }
  if (begin_ > 0) { // the beginning of a frame
    std::memmove(buffer_.get(), buffer_.get() + begin_, end_ - begin_);
    end_ -= begin_;
    begin_ = 0;
  }
}

void Channel::on_frame(const Frame& frame) {
  switch (frame.kind) {
    case Kind::kPart:
      part_tag_ = frame.tag;
      part_left_ = frame.bytes;
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
      if (!part_ || part_->data != data) {
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

void Channel::take(uint32_t tag, const char* from, size_t bytes) {
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
    const auto room = data->room();
    const size_t some = std::min(room.bytes, bytes);
    if (some == 0) {
      refuse_message(peer_, bytes, "there is no room for it");
    }
    std::memcpy(room.at, from, some);
    from += some;
    bytes -= some;
    come(tag, *data, some);
  }
}

void Channel::come(uint32_t tag, IncomingData& data, size_t bytes) {
  data.come(bytes);
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

IncomingData::Room IncomingData::room() const {
  auto* memory = place_ != nullptr ? place_ : static_cast<char*>(memory_.get());
  const size_t at = come_ % capacity_;
  return {memory + at, std::min(granted_ - come_, capacity_ - at)};
}

void IncomingData::come(size_t bytes) {
  come_ += bytes;
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
