// What two builds of fog must have in common to work in one job.
#pragma once

#include <string>

namespace fog {

// "fog protocol 1 (layout 1a2b3c4d, torch 2.13)": the number of the protocol, a hash of the layout of all that processes read of
// each other, and the torch whose dtypes and reductions the headers number.
std::string protocol();

} // namespace fog
