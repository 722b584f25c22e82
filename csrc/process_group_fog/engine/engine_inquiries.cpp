// Inquiries: how ranks find out which ranks an operation lacks when its timeout is over.
#include <algorithm>

#include <c10/util/Exception.h>

#include "core/copy.hpp"
#include "engine/engine.hpp"
#include "engine/inquiry.hpp"

namespace fog {

void Engine::ask_early(Operation& operation, Deadline now) {
  constexpr auto kEarly = std::chrono::seconds(1);
  if (operation.asked_early || now < operation.deadline() - operation.timeout() + kEarly) {
    return;
  }
  operation.asked_early = true;
  if (transport_ && operation.signature().kind != OpKind::kPointToPoint) {
    ask(operation, Inquiry(now).next(operation.awaited()));
  }
}

bool Engine::inquire(const std::shared_ptr<Operation>& operation, Deadline now) {
  auto& inquiry = operation->inquiry;
  if (!inquiry) {
    inquiry = std::make_unique<Inquiry>(now);
    // point-to-point operations involve only two ranks
    if (transport_ && operation->signature().kind != OpKind::kPointToPoint) {
      ask(*operation, inquiry->next(operation->awaited()));
    }
  }
  return !inquiry->is_over(now);
}

void Engine::ask(const Operation& operation, const std::vector<int>& ranks) {
  Header header;
  header.kind = MessageKind::kAsk;
  header.operation.key = operation.key();
  header.operation.use = operation.use().number;
  header.operation.generation = operation.use().generation;
  header.operation.signature = operation.signature();
  header.group = operation.group()->id;
  for (const int rank : ranks) {
    send_quietly(operation.group()->members[rank].peer_id, header);
  }
}

void Engine::on_ask(const std::shared_ptr<Group>& group, int source, const Header& header) {
  Reply reply;
  const auto found = group->by_key.find(header.operation.key);
  const bool is_named = (header.operation.key & kNamedKey) != 0;
  const auto since = is_named
      ? group->names.uses_since(header.operation.key, source, {header.operation.use, header.operation.generation})
      : std::nullopt;
  const bool came = is_named ? since.value_or(-1) >= 0 : header.operation.key < group->next_key;
  if (found != group->by_key.end() && since.value_or(0) == 0) {
    // If both ranks first wait for other ranks, no message between them has shown the disagreement.
    const auto& own = found->second->signature();
    TORCH_CHECK_WITH(
        DistBackendError, is_named || own.agrees_with(header.operation.signature), found->second->describe(),
        ": ranks disagree: this rank called ", own.describe(), ", rank ", source, " called ", header.operation.signature.describe());
    reply.waits_for = found->second->awaited();
    reply.state = Reply::State::kWaits;
  } else if (came) {
    reply.state = Reply::State::kEnded;
  }
  Header answer;
  answer.kind = MessageKind::kAnswer;
  answer.group = group->id;
  answer.operation.key = header.operation.key;
  send_quietly(group->members[source].peer_id, answer, reply.written());
}

void Engine::on_answer(const std::shared_ptr<Group>& group, int source, const Header& header, const char* data) {
  const auto found = group->by_key.find(header.operation.key);
  if (found != group->by_key.end() && found->second->inquiry) {
    const auto reply = Reply::read(std::string(data, header.bytes), group->size());
    auto& inquiry = *found->second->inquiry;
    inquiry.answer(source, reply);
    auto others = reply.waits_for;
    others.erase(group->rank);
    ask(*found->second, inquiry.next(others));
  }
}

std::string Reply::written() const {
  std::vector<int32_t> numbers{static_cast<int32_t>(state)};
  for (const int rank : waits_for) {
    if (numbers.size() <= kMostNamed) {
      numbers.push_back(rank);
    }
  }
  return {reinterpret_cast<const char*>(numbers.data()), numbers.size() * sizeof(int32_t)};
}

Reply Reply::read(const std::string& text, int size) {
  std::vector<int32_t> numbers(text.size() / sizeof(int32_t));
  copy_bytes(numbers.data(), text.data(), numbers.size() * sizeof(int32_t));
  const auto is_rank = [size](int32_t number) { return number >= 0 && number < size; };
  TORCH_CHECK_WITH(
      DistBackendError,
      !numbers.empty() && numbers[0] >= 0 && numbers[0] <= static_cast<int32_t>(State::kEnded) &&
          std::all_of(numbers.begin() + 1, numbers.end(), is_rank),
      "a rank's answer about the ranks that it waits for cannot be read");
  return {static_cast<State>(numbers[0]), {numbers.begin() + 1, numbers.end()}};
}

std::vector<int> Inquiry::next(const std::set<int>& ranks) {
  std::vector<int> unasked;
  for (const int rank : ranks) {
    if (asked_.size() < kMostAsked && asked_.insert(rank).second) {
      silent_.insert(rank);
      unasked.push_back(rank);
    }
  }
  return unasked;
}

void Inquiry::answer(int rank, const Reply& reply) {
  if (silent_.erase(rank) > 0 && reply.state != Reply::State::kWaits) {
    (reply.state == Reply::State::kAbsent ? absent_ : ended_).insert(rank);
  }
}

} // namespace fog
