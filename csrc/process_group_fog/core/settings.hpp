// What the environment says. fog_pg/_settings.py reads the variables, checks them, and sets this before each group.
#pragma once

#include <cstddef>
#include <string>

namespace fog {

// fog_pg/environment.py explains the values and has the defaults.
struct Settings {
  std::string between_hosts; // "auto", "tcp" or "rma"
  std::string interface;
  std::string job_secret;
  std::string timeline; // the prefix of its files
  bool local_links = true; // false: ranks of one host reach this one as if they were on other hosts
  int connections = 0; // so many carry data to a peer by TCP; 0 if that is measured
  size_t rma_bytes = 0;
  int host_timeout = 0; // seconds, like the next two
  int warn_after = 0;
  int lost_after = 0;
  int max_ranks = 0;
  int local_ranks = 0; // on this host, as the launcher says; 0 if it does not, like the next one
  int launcher_size = 0; // ranks that mpiexec or srun have started
  int launcher_rank = 0;
};

// Returns a copy, because other threads may set them meanwhile.
Settings settings();
void set_settings(Settings changed);

} // namespace fog
