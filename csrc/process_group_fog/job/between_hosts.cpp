#include "job/between_hosts.hpp"

#include <array>
#include <cstdlib>
#include <filesystem>
#include <mutex>
#include <optional>
#include <system_error>

#include <c10/util/Exception.h>

#include "core/settings.hpp"

namespace fog {
namespace {

constexpr std::array<BetweenHosts, 3> kWays = {BetweenHosts::kAuto, BetweenHosts::kTcp, BetweenHosts::kRma};

std::mutex choosing;
std::optional<BetweenHosts> chosen;

BetweenHosts parse(const std::string& name) {
  for (const auto way : kWays) {
    if (name == name_of(way)) {
      return way;
    }
  }
  TORCH_CHECK_VALUE(false, "between_hosts: got '", name, "'; allowed are 'auto', 'tcp' and 'rma' (tcp has replaced MPI's messages)");
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
  const auto asked = option.empty() ? std::nullopt : std::make_optional(parse(option));
  if (!chosen) {
    chosen = asked ? *asked : parse(settings().between_hosts);
  }
  TORCH_CHECK_VALUE(
      !asked || *asked == *chosen, "between_hosts: got '", option, "'; the first fog group of this process has chosen '",
      name_of(*chosen), "', which holds for all");
}

BetweenHosts between_hosts() {
  const std::lock_guard<std::mutex> lock(choosing);
  return chosen ? *chosen : parse(settings().between_hosts);
}

std::string fabric_hint() {
  for (const char* variable : {"UCX_TLS", "FI_PROVIDER", "MPICH_CH4_NETMOD"}) {
    if (const char* value = std::getenv(variable); value != nullptr && *value != '\0') {
      return std::string(variable) + " is set";
    }
  }
  std::error_code none;
  for (const auto& device : std::filesystem::directory_iterator("/sys/class/infiniband", none)) {
    return "there is the device " + device.path().filename().string();
  }
  return "";
}

} // namespace fog
