#include "job/peer_information.hpp"

#include <unistd.h>

#include <cstdlib>
#include <filesystem>
#include <random>
#include <sstream>
#include <system_error>
#include <type_traits>

#include <c10/util/Exception.h>

#include "core/settings.hpp"
#include "job/hosts.hpp"
#include "job/secret.hpp"

namespace fog {
namespace {

std::string own_protocol;

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

} // namespace

void set_protocol(const std::string& protocol) {
  own_protocol = protocol;
}

std::string random_job_name() {
  return c10::str("fog_", getpid(), '_', random_digits(32));
}

PeerInformation own_information() {
  std::random_device device;
  PeerInformation mine;
  mine.protocol = own_protocol;
  mine.between_hosts = settings().between_hosts;
  mine.fabric = fabric_hint();
  mine.max_ranks = settings().max_ranks;
  mine.links = settings().local_links;
  if (job_secret().empty()) {
    mine.offered_secret = random_secret();
  } else {
    mine.secret_mark = hexadecimal(proof_of("fog mark of the secret"));
  }
  mine.pid = static_cast<int>(getpid());
  mine.host_id = host_id();
  mine.host_name = host_name();
  mine.random = (static_cast<uint64_t>(device()) << 32) | device();
  return mine;
}

// Calls use() with each field, in the order of their lines. The protocol must come first in all builds, because builds may
// differ in the lines after it.
template <typename Rank, typename Use>
void for_fields(Rank& rank, Use use) {
  use(rank.protocol);
  use(rank.host_id);
  use(rank.beacon);
  use(rank.between_hosts);
  use(rank.fabric);
  use(rank.secret_mark);
  use(rank.offered_secret);
  use(rank.max_ranks);
  use(rank.links);
  use(rank.job);
  use(rank.world_rank);
  use(rank.pid);
  use(rank.host_name);
  use(rank.host);
  use(rank.shares_memory);
  use(rank.address);
  use(rank.tcp);
  use(rank.random);
}

std::string to_text(const PeerInformation& rank) {
  std::ostringstream text;
  for_fields(rank, [&](const auto& field) { text << field << '\n'; });
  return text.str();
}

PeerInformation read_peer_information(const std::string& text) {
  std::istringstream lines(text);
  PeerInformation rank;
  for_fields(rank, [&](auto& field) {
    std::string line;
    std::getline(lines, line);
    if constexpr (std::is_same_v<decltype(field), std::string&>) {
      field = line;
    } else {
      std::istringstream(line) >> field;
    }
  });
  return rank;
}

std::string short_version(const std::string& text) {
  std::istringstream words(text.substr(0, text.find_first_of(",\n")));
  std::string all;
  for (std::string word; words >> word;) {
    all += word == "Version:" ? "" : (all.empty() ? "" : " ") + word;
  }
  return all;
}

void check_versions(const std::vector<std::string>& versions) {
  for (size_t rank = 1; rank < versions.size(); ++rank) {
    TORCH_CHECK_WITH(
        DistBackendError, versions[rank] == versions[0], "fog: different versions in one job: rank 0 has ", versions[0], "; rank ",
        rank, " has ", versions[rank], ". Install the same fog, torch and MPI for all ranks.");
  }
}

void check_alike(const std::vector<PeerInformation>& ranks) {
  std::vector<std::string> versions;
  for (const auto& rank : ranks) {
    versions.push_back(rank.protocol);
  }
  check_versions(versions);
  const auto check_setting = [&](const char* names, auto setting) {
    for (size_t rank = 1; rank < ranks.size(); ++rank) {
      TORCH_CHECK_WITH(
          DistBackendError, ranks[rank].*setting == ranks[0].*setting, "fog: ranks disagree on ", names, ": rank 0 has '",
          ranks[0].*setting, "', rank ", rank, " has '", ranks[rank].*setting, "'");
    }
  };
  check_setting("FOG_BETWEEN_HOSTS", &PeerInformation::between_hosts);
  check_setting("FOG_MAX_RANKS", &PeerInformation::max_ranks);
}

void settle_secret(const std::vector<PeerInformation>& ranks) {
  const auto& first = ranks[0].secret_mark;
  for (size_t rank = 1; rank < ranks.size(); ++rank) {
    const auto& its = ranks[rank].secret_mark;
    TORCH_CHECK_WITH(
        DistBackendError, its == first, "fog: ranks disagree on FOG_JOB_SECRET: rank 0 has ", first.empty() ? "none" : "one", ", rank ",
        rank, " has ", its.empty() ? "none" : (first.empty() ? "one" : "another"),
        ". The launcher must pass it to all ranks, or to none");
  }
  if (first.empty()) {
    set_job_secret(ranks[0].offered_secret);
  }
}

} // namespace fog
