// send, recv and recv from any source.
#pragma once

#include "engine/operation.hpp"

namespace fog {

class PointToPoint : public Operation {
 public:
  PointToPoint(Signature signature, int tag) : Operation(signature), tag_(tag) {}
  uint64_t tag() const final {
    return static_cast<uint64_t>(tag_);
  }

 private:
  const int tag_;
};

class PointToPointSend : public PointToPoint {
 public:
  PointToPointSend(Signature signature, int peer, int tag, const void* data, size_t bytes);

 protected:
  void launch() override;
  Action advance() override;

 private:
  const int peer_;
  const void* const data_;
  const size_t bytes_;
};

class PointToPointReceive : public PointToPoint {
 public:
  // A `peer` of -1 receives from any rank; the Work's source then names the rank.
  PointToPointReceive(Signature signature, int peer, int tag, void* data, size_t bytes);
  bool receives() const override {
    return true;
  }
  bool matches(int source, const Header& header) const override;

 protected:
  void launch() override;
  Action advance() override;

 private:
  const int peer_;
  void* const data_;
  const size_t bytes_;
};

} // namespace fog
