// Python's lock (the GIL), for code that does not include Python.
#pragma once

#include <functional>

namespace fog {

// Runs a function that takes long, or that may wait for a thread that needs the GIL. Releases the GIL meanwhile if this
// thread holds it.
void without_python_lock(const std::function<void()>& function);

// Sets the function that releases the GIL. Before this is called, functions run without any change to the GIL.
void set_python_lock(std::function<void(const std::function<void()>&)> without_lock);

} // namespace fog
