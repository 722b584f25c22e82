#include "job/between_hosts.hpp"

#include <array>
#include <cerrno>
#include <cstdlib>
#include <mutex>
#include <optional>
#include <string_view>

#include <c10/util/Exception.h>

namespace fog {
namespace {

constexpr std::array<BetweenHosts, 4> kWays = {BetweenHosts::kAuto, BetweenHosts::kRma, BetweenHosts::kMessages, BetweenHosts::kTcp};

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
  TORCH_CHECK_VALUE(false, argument, ": got '", name, "'; allowed are 'auto', 'rma', 'messages' and 'tcp'");
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
    case BetweenHosts::kRma:
      return "rma";
    case BetweenHosts::kMessages:
      return "messages";
    case BetweenHosts::kTcp:
      break;
  }
  return "tcp";
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

const char* name_of(SumsBy sums) {
  return sums == SumsBy::kFog ? "fog" : "mpi";
}

SumsBy sums_by(const std::string& option) {
  const auto value = environment("FOG_REDUCE");
  const bool given = !option.empty();
  const auto& name = given ? option : value;
  for (const auto sums : {SumsBy::kFog, SumsBy::kMpi}) {
    if (name == name_of(sums)) {
      TORCH_CHECK_VALUE(
          sums != SumsBy::kMpi || between_hosts() != BetweenHosts::kTcp, given ? "reduce" : "FOG_REDUCE",
          ": got 'mpi', but with between_hosts='tcp' (or FOG_BETWEEN_HOSTS=tcp) MPI is not used; allowed is 'fog'");
      return sums;
    }
  }
  TORCH_CHECK_VALUE(name.empty(), given ? "reduce" : "FOG_REDUCE", ": got '", name, "'; allowed are 'fog' and 'mpi'");
  return SumsBy::kFog;
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
  return environment("FOG_LOCAL_LINKS") != "0";
}

} // namespace fog
