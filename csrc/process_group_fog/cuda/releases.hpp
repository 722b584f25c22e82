// What is given back to a device's driver, in a thread of fog's.
#pragma once

#include <functional>

#include <c10/core/Device.h>

#include "cuda/driver.hpp"

namespace fog::cuda {

// Gives something of a device back, in that device's context and, so that nobody waits, in a thread of fog's: drivers wait there for all
// that the device has been given, which may wait for other ranks, and whoever drops a tensor usually has Python's lock.
void give_back(const at::Device& device, std::function<void(const Driver&)> release);
// Waits until that has been done with all that was given back: for those who need more than is left.
void await_given_back();

} // namespace fog::cuda
