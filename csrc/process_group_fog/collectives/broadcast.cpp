#include "collectives/broadcast.hpp"

#include "collectives/cutovers.hpp"
#include "collectives/schedule.hpp"

namespace fog {
Broadcast::Broadcast(Signature signature, void* data, size_t bytes)
    : Operation(signature), data_(static_cast<char*>(data)), bytes_(bytes) {}

Slice Broadcast::slice(int place) const {
  return slice_of(bytes_, place, hosts().least());
}

Slice Broadcast::piece(int place, int host) const {
  const auto whole = slice(place);
  const int root_host = hosts().machine_of(signature_.root);
  const auto part = slice_of(whole.numel, (host - root_host + hosts().count()) % hosts().count() - 1, hosts().count() - 1);
  return {whole.begin + part.begin, part.numel};
}

std::vector<int> Broadcast::hosts_across() const {
  std::vector<int> across;
  const int root_host = hosts().machine_of(signature_.root);
  for (int distance = 1; distance < hosts().count(); ++distance) {
    const int host = (hosts().machine() + distance) % hosts().count();
    if (host != root_host) {
      across.push_back(host);
    }
  }
  return across;
}

void Broadcast::launch() {
  const bool in_slices = cutovers::in_slices(bytes_, hosts());
  const bool star = bytes_ > Transport::kLocalInlineBytes;
  if (!in_slices) {
    tree_ = host_tree(hosts(), signature_.root, star);
  }
  if (confirms()) {
    announcements_ = in_slices || star ? host_tree(hosts(), signature_.root) : tree_;
    for (const auto& child : announcements_.children) {
      expect_announcement(child.rank);
    }
  }
  if (in_slices) {
    launch_slices();
    return;
  }
  if (tree_.parent >= 0) {
    receive(tree_.parent, kDown, data_, bytes_);
  }
}

void Broadcast::launch_slices() {
  const int root = signature_.root;
  const int root_host = hosts().machine_of(root);
  const int places = hosts().least();
  if (rank() == root) {
    role_ = Role::kRoot;
    send(destinations_at(others_of(hosts().local(), hosts().place())), kDown, data_, bytes_);
    for (int distance = 1; distance < hosts().count(); ++distance) {
      const int host = (root_host + distance) % hosts().count();
      for (int place = 0; place < places; ++place) {
        const auto part = piece(place, host);
        send(hosts().rank(host, place), kDown, data_ + part.begin, part.numel);
      }
    }
    return;
  }
  if (hosts().machine() == root_host) {
    role_ = Role::kBesideRoot;
    receive(root, kDown, data_, bytes_);
    return;
  }
  const int own = hosts().place();
  role_ = own < places ? Role::kPlace : Role::kLocal;
  for (int place = 0; place < places; ++place) {
    if (place != own) {
      receive(hosts().local()[place], kShared, data_ + slice(place).begin, slice(place).numel);
    }
  }
  if (role_ == Role::kPlace) {
    const auto mine = piece(own, hosts().machine());
    receive(root, kDown, data_ + mine.begin, mine.numel);
    for (const int host : hosts_across()) {
      const auto theirs = piece(own, host);
      receive(hosts().rank(host, own), kAcross, data_ + theirs.begin, theirs.numel);
    }
  }
}

// The next steps of a rank that takes part between hosts.
void Broadcast::advance_place() {
  const int own = hosts().place();
  if (!passed_on_ && received(kDown)) {
    passed_on_ = true;
    const auto mine = piece(own, hosts().machine());
    for (const int host : hosts_across()) {
      send(hosts().rank(host, own), kAcross, data_ + mine.begin, mine.numel);
    }
  }
  if (!shared_ && received(kDown) && received(kAcross)) {
    shared_ = true;
    send(destinations_at(others_of(hosts().local(), own)), kShared, data_ + slice(own).begin, slice(own).numel);
  }
}

Operation::Action Broadcast::advance() {
  if (!announced_ && announced()) {
    announced_ = true;
    if (announcements_.parent >= 0) {
      announce_to(announcements_.parent);
    }
  }
  if (role_ == Role::kPlace) {
    advance_place();
  } else if (!passed_on_ && received(kDown)) {
    passed_on_ = true;
    std::vector<Destination> children;
    for (const auto& child : tree_.children) {
      children.push_back({child.rank});
    }
    send(children, kDown, data_, bytes_);
  }
  return received_all() ? Action::kDone : Action::kWait;
}

} // namespace fog
