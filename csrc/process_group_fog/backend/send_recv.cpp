// Messages between two ranks.
#include "backend/process_group_fog.hpp"

#include "backend/arguments.hpp"
#include "collectives/point_to_point.hpp"
#include "backend/staging.hpp"

namespace fog {

using c10d::OpType;
using WorkPtr = c10::intrusive_ptr<c10d::Work>;

WorkPtr ProcessGroupFog::send(std::vector<at::Tensor>& tensors, int destination, int tag) {
  if (const auto delegate = delegate_of("send", tensors)) {
    return delegate->send(tensors, destination, tag);
  }
  const auto tensor = only_tensor("send", "tensors", tensors);
  check_tensor("send", "tensors", tensor);
  check_peer("send", destination, tag);
  Staging staging;
  const auto block = part_of(staging.input(tensor));
  auto operation =
      std::make_shared<PointToPointSend>(Signature::of(OpKind::kPointToPoint, tensor), destination, tag, block.data, block.bytes);
  staging.attach(*operation);
  return submit(operation, {OpType::SEND, "fog:send", tensors, {}}, call_options(c10d::kUnsetTimeout));
}

WorkPtr ProcessGroupFog::recv(std::vector<at::Tensor>& tensors, int source, int tag) {
  if (const auto delegate = delegate_of("recv", tensors)) {
    return delegate->recv(tensors, source, tag);
  }
  check_peer("recv", source, tag);
  return receive("recv", OpType::RECV, "fog:recv", tensors, source, tag);
}

WorkPtr ProcessGroupFog::recvAnysource(std::vector<at::Tensor>& tensors, int tag) {
  if (const auto delegate = delegate_of("recvAnysource", tensors)) {
    return delegate->recvAnysource(tensors, tag);
  }
  TORCH_CHECK_VALUE(size_ > 1, "recvAnysource: got a group of this rank alone; no other rank can send to it");
  TORCH_CHECK_VALUE(tag >= 0, "recvAnysource: tag: got ", tag, "; allowed are 0 and more");
  return receive("recvAnysource", OpType::RECVANYSOURCE, "fog:recvAnySource", tensors, -1, tag);
}

WorkPtr ProcessGroupFog::receive(
    const char* op, OpType type, const char* title, std::vector<at::Tensor>& tensors, int source, int tag) {
  const auto tensor = only_tensor(op, "tensors", tensors);
  check_output(op, "tensors", tensor);
  Staging staging;
  const auto block = part_of(staging.output(tensor));
  auto operation =
      std::make_shared<PointToPointReceive>(Signature::of(OpKind::kPointToPoint, tensor), source, tag, block.data, block.bytes);
  staging.attach(*operation);
  return submit(operation, {type, title, tensors, tensors}, call_options(c10d::kUnsetTimeout));
}

} // namespace fog
