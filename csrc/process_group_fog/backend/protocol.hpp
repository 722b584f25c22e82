// What two builds of fog must have in common to work in one job.
#pragma once

#include <string>

namespace fog {

// "fog 0.1 (protocol 1, layout 1a2b3c4d), torch 2.13.0": the versions, the number of the protocol, and a hash of the layout of all that
// processes read of each other. The headers number torch's dtypes and reductions.
std::string protocol();

// The package's version, which the extension itself does not know.
void set_version(const std::string& version);

} // namespace fog
