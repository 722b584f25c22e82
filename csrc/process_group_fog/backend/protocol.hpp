// The properties that two builds of fog must share to work in one job.
#pragma once

#include <string>

namespace fog {

// "fog 0.1 (protocol 1, layout 1a2b3c4d), torch 2.13.0": the versions, the protocol's number, and a hash of the layout
// of all data that processes read from each other. The versions include torch's, because headers contain its numbers
// for dtypes and reductions.
std::string protocol();

// Sets the package's version, which the extension itself does not know.
void set_version(const std::string& version);

} // namespace fog
