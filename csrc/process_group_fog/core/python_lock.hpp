// Python's lock (the GIL), for code that does not know Python.
#pragma once

#include <functional>

namespace fog {

// Runs a function that may wait for a thread that needs Python's lock, or that takes long: without it, if this thread has it.
void without_python_lock(const std::function<void()>& function);

// Sets how that is done; until then functions are just run.
void set_python_lock(std::function<void(const std::function<void()>&)> without_lock);

} // namespace fog
