#include "job/between_hosts.hpp"

#include <array>
#include <cerrno>
#include <cstdlib>
#include <filesystem>
#include <mutex>
#include <optional>
#include <system_error>

#include <c10/util/Exception.h>

namespace fog {
namespace {

constexpr std::array<BetweenHosts, 3> kWays = {BetweenHosts::kAuto, BetweenHosts::kTcp, BetweenHosts::kRma};

std::mutex choosing;
std::optional<BetweenHosts> chosen;

std::string environment(const char* name) {
  const char* value = std::getenv(name);
  return value == nullptr ? "" : value;
}

BetweenHosts parse(const char* argument, const std::string& name) {
  for (const auto way : kWays) {
    if (name == name_of(way)) {
      return way;
    }
  }
  TORCH_CHECK_VALUE(false, argument, ": got '", name, "'; allowed are 'auto', 'tcp' and 'rma' (tcp has replaced MPI's messages)");
}

BetweenHosts of_environment() {
  const auto value = environment("FOG_BETWEEN_HOSTS");
  return value.empty() ? BetweenHosts::kAuto : parse("FOG_BETWEEN_HOSTS", value);
}

} // namespace

const char* name_of(BetweenHosts way) {
  switch (way) {
    case BetweenHosts::kAuto:
      return "auto";
    case BetweenHosts::kTcp:
      return "tcp";
    case BetweenHosts::kRma:
      break;
  }
  return "rma";
}

void choose_between_hosts(const std::string& option) {
  const std::lock_guard<std::mutex> lock(choosing);
  const auto asked = option.empty() ? std::nullopt : std::make_optional(parse("between_hosts", option));
  if (!chosen) {
    chosen = asked ? *asked : of_environment();
  }
  TORCH_CHECK_VALUE(
      !asked || *asked == *chosen, "between_hosts: got '", option, "'; the first fog group of this process has chosen '",
      name_of(*chosen), "', which holds for all");
}

BetweenHosts between_hosts() {
  const std::lock_guard<std::mutex> lock(choosing);
  return chosen ? *chosen : of_environment();
}

std::string fabric_hint() {
  for (const char* variable : {"UCX_TLS", "FI_PROVIDER", "MPICH_CH4_NETMOD"}) {
    if (!environment(variable).empty()) {
      return std::string(variable) + " is set";
    }
  }
  std::error_code none;
  for (const auto& device : std::filesystem::directory_iterator("/sys/class/infiniband", none)) {
    return "there is the device " + device.path().filename().string();
  }
  return "";
}

size_t rma_bytes() {
  constexpr size_t kDefault = size_t(256) << 20;
  constexpr size_t kLeast = size_t(1) << 20;
  const auto value = environment("FOG_RMA_BYTES");
  if (value.empty()) {
    return kDefault;
  }
  char* end = nullptr;
  errno = 0;
  const auto bytes = std::strtoull(value.c_str(), &end, 10);
  TORCH_CHECK_VALUE(
      errno == 0 && *end == '\0' && value[0] >= '0' && value[0] <= '9' && bytes >= kLeast && bytes < size_t(1) << 48,
      "FOG_RMA_BYTES: got '", value, "'; allowed are numbers of bytes from ", kLeast, " on");
  return bytes;
}

bool has_local_links() {
  return environment("_FOG_LOCAL_LINKS") != "0";
}

} // namespace fog
