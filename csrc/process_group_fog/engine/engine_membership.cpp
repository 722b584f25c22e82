// Messages about who is a member: the mail of a process, and how the engine sends and receives it.
#include <algorithm>
#include <iterator>

#include "engine/engine.hpp"
#include "engine/membership_mail.hpp"

namespace fog {
namespace {

// Between two looks for Ctrl-C.
constexpr auto kInterruptInterval = std::chrono::milliseconds(50);
// A process for which more bytes wait here gets no further messages, because it does not read.
constexpr size_t kMostUnsent = size_t(16) << 20;

} // namespace

bool MembershipMail::add(int source, const Header& header, const char* data) {
  const auto& part = header.membership;
  auto& text = begun_[source];
  if (part.begin == 0) {
    text.clear();
  }
  if (part.begin != text.size()) { // its sender could not send all parts
    return false;
  }
  text.append(data, header.bytes);
  if (text.size() < part.whole) {
    return false;
  }
  messages_.emplace_back(source, std::move(text));
  begun_.erase(source);
  bytes_ += messages_.back().second.size();
  while (messages_.size() > kMostMessages || bytes_ > kMostBytes) {
    bytes_ -= messages_.front().second.size();
    messages_.pop_front();
  }
  return true;
}

std::vector<MembershipMail::Message> MembershipMail::take() {
  bytes_ = 0;
  auto taken = std::exchange(messages_, {});
  return {std::make_move_iterator(taken.begin()), std::make_move_iterator(taken.end())};
}

void MembershipMail::forget(int source) {
  begun_.erase(source);
  for (auto message = messages_.begin(); message != messages_.end();) {
    if (message->first == source) {
      bytes_ -= message->second.size();
      message = messages_.erase(message);
    } else {
      ++message;
    }
  }
}

bool Engine::send_membership(int peer_id, uint64_t epoch, std::string_view text) {
  auto lock = locked();
  const bool sent = post_membership(peer_id, epoch, false, text);
  const bool goes_on = transport_ && transport_->sending(); // it connects, or waits for space
  unlock_and_deliver(lock);
  if (goes_on) {
    bell().wake(Doorbell::kBackground);
  }
  return sent;
}

bool Engine::post_membership(int peer_id, uint64_t epoch, bool is_answer, std::string_view text) {
  if (stopping_ || !transport_ || !peers()[peer_id].is_alive() || !transport_->knows(peer_id) ||
      transport_->unsent(peer_id) > kMostUnsent) {
    return false;
  }
  Header header;
  header.kind = MessageKind::kMembership;
  header.membership = {epoch, static_cast<uint32_t>(text.size()), 0, static_cast<uint8_t>(is_answer ? 1 : 0)};
  auto& begin = header.membership.begin;
  try {
    do {
      header.bytes = std::min(text.size() - begin, Transport::kInlineBytes);
      transport_->send(peer_id, header, text.data() + begin);
      begin += static_cast<uint32_t>(header.bytes);
    } while (begin < text.size());
  } catch (const std::exception&) { // no memory, or its process has just ended
    return false;
  }
  return true;
}

void Engine::on_membership(int source, const Header& header, const char* data) {
  if (groups_.empty() || !mail_.add(source, header, data)) {
    return;
  }
  mail_came_.notify_all();
  const auto& answer = mail_.answer;
  if (answer && header.membership.is_answer == 0 && header.membership.epoch <= answer->epoch) {
    post_membership(source, answer->epoch, true, answer->text);
  }
}

std::vector<MembershipMail::Message> Engine::take_membership() {
  const auto lock = locked();
  return mail_.take();
}

bool Engine::wait_membership(Deadline deadline) {
  const bool interrupts = is_main_thread();
  auto lock = locked();
  const auto is_over = [this] { return !mail_.empty() || stopping_; };
  for (auto now = std::chrono::steady_clock::now(); now < deadline; now = std::chrono::steady_clock::now()) {
    if (mail_came_.wait_until(lock, interrupts ? std::min(deadline, now + kInterruptInterval) : deadline, is_over)) {
      break;
    }
    if (interrupts) {
      lock.unlock();
      check_interrupt();
      lock.lock();
    }
  }
  return !mail_.empty();
}

void Engine::answer_membership(uint64_t epoch, std::string text) {
  const auto lock = locked();
  mail_.answer = MembershipMail::Answer{epoch, std::move(text)};
}

} // namespace fog
