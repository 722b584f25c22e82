// The transfers of one call of ProcessTransport::send().
#pragma once

#include <algorithm>
#include <memory>
#include <optional>
#include <vector>

#include "transport/process_transport.hpp"

namespace fog {

class ProcessTransport::ToSeveral final : public Outgoing {
 public:
  explicit ToSeveral(size_t bytes) : bytes_(bytes) {}

  bool done() const override {
    return readers_.empty() && (!stream || stream->sent_all());
  }
  bool done(PeerId peer) const override {
    return std::find(readers_.begin(), readers_.end(), peer) == readers_.end() && (!stream || stream->sent_all(peer));
  }
  size_t sent() const override {
    size_t sent = stream ? stream->sent() : bytes_;
    for (const auto& put : puts) {
      sent = std::min(sent, put->sent());
    }
    return sent;
  }
  std::optional<Fill> next_fill() override {
    return stream ? stream->next_fill() : std::nullopt;
  }
  void filled(const Fill& fill) override {
    stream->filled(fill);
  }

  void add(PeerId reader) {
    readers_.push_back(reader);
  }
  void remove(PeerId reader) {
    readers_.erase(std::find(readers_.begin(), readers_.end(), reader));
  }

  std::shared_ptr<shared_memory::OutgoingStream> stream;
  std::vector<std::shared_ptr<mpi::OutgoingPut>> puts;
  c10::DataPtr copy; // a copy of the data if the owner's memory may change

 private:
  const size_t bytes_;
  std::vector<PeerId> readers_; // peers that do not read the stream
};

} // namespace fog
