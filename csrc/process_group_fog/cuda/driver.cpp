#include "cuda/driver.hpp"

#include <dlfcn.h>
#include <glob.h>

#include <map>
#include <memory>
#include <mutex>

#include <c10/util/Exception.h>

namespace fog::cuda {

// What is known of one type of device.
struct Opened {
  std::string library;
  std::vector<std::string> compilers;
  std::unique_ptr<Driver> driver;
  std::unique_ptr<Compiler> compiler;

  const Driver& open_driver() {
    if (!driver) {
      std::string why;
      void* handle = open(library, why);
      TORCH_CHECK(handle != nullptr, "fog: cannot open the device's driver: ", why);
      auto opened = std::unique_ptr<Driver>(new Driver);
#define FOG_FILL(name, symbol, parameters) fill(opened->name, handle, #symbol, library);
      FOG_CUDA_DRIVER_FUNCTIONS(FOG_FILL)
#undef FOG_FILL
#define FOG_FILL(name, symbol, parameters) opened->name = reinterpret_cast<decltype(opened->name)>(dlsym(handle, #symbol));
      FOG_CUDA_OPTIONAL_DRIVER_FUNCTIONS(FOG_FILL)
#undef FOG_FILL
      driver = std::move(opened);
    }
    return *driver;
  }

  const Compiler& open_compiler() {
    if (!compiler) {
      std::string why;
      void* handle = nullptr;
      std::string path;
      for (size_t i = 0; i < compilers.size() && handle == nullptr; ++i) {
        path = compilers[i];
        handle = open(path, why);
      }
      TORCH_CHECK(handle != nullptr, "fog: cannot open the device's run-time compiler, NVRTC: ", why.empty() ? "none is named" : why);
      auto opened = std::unique_ptr<Compiler>(new Compiler);
#define FOG_FILL(name, symbol, result, parameters) fill(opened->name, handle, #symbol, path);
      FOG_NVRTC_FUNCTIONS(FOG_FILL)
#undef FOG_FILL
      open_builtins(reinterpret_cast<const void*>(opened->create));
      compiler = std::move(opened);
    }
    return *compiler;
  }

 private:
  static void* open(const std::string& path, std::string& why) {
    void* handle = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
    if (handle == nullptr) {
      why += (why.empty() ? "" : "; ") + std::string(dlerror());
    }
    return handle;
  }

  // NVRTC opens a second library by its name alone, which it finds if that is open: NVIDIA's wheels put it where nobody looks.
  static void open_builtins(const void* of_compiler) {
    Dl_info place{};
    if (dladdr(of_compiler, &place) == 0 || place.dli_fname == nullptr) {
      return;
    }
    const std::string file = place.dli_fname;
    const auto pattern = file.substr(0, file.rfind('/') + 1) + "libnvrtc-builtins.so.*";
    glob_t found{};
    if (glob(pattern.c_str(), 0, nullptr, &found) == 0) {
      for (size_t i = 0; i < found.gl_pathc; ++i) {
        dlopen(found.gl_pathv[i], RTLD_NOW | RTLD_LOCAL);
      }
    }
    globfree(&found);
  }

  template <typename Function>
  static void fill(Function& function, void* handle, const char* symbol, const std::string& path) {
    void* address = dlsym(handle, symbol);
    TORCH_CHECK(address != nullptr, "fog: ", path, " has no ", symbol, "; fog needs that of CUDA 12 or later");
    function = reinterpret_cast<Function>(address);
  }
};

namespace {

struct Drivers {
  std::mutex mutex;
  std::map<at::DeviceType, Opened> by_type;
};

Drivers& drivers() {
  static auto* all = new Drivers; // the process's end needs no order
  return *all;
}

Opened& known(at::DeviceType type) {
  const auto found = drivers().by_type.find(type);
  TORCH_CHECK(found != drivers().by_type.end(), "fog: no driver is known for devices of type ", c10::DeviceTypeName(type, true));
  return found->second;
}

} // namespace

void set_driver(at::DeviceType type, std::string library, std::vector<std::string> compilers) {
  const std::lock_guard<std::mutex> lock(drivers().mutex);
  auto& opened = drivers().by_type[type];
  opened.library = std::move(library);
  opened.compilers = std::move(compilers);
}

const Driver& Driver::of(at::DeviceType type) {
  const std::lock_guard<std::mutex> lock(drivers().mutex);
  return known(type).open_driver();
}

void Driver::check(DriverResult result, const char* what) const {
  if (result != 0) {
    const char* text = nullptr;
    get_error_string(result, &text);
    TORCH_CHECK(false, "fog: cannot ", what, ": ", text == nullptr ? "unknown error" : text, " (CUresult ", result, ")");
  }
}

Driver::Scope::Scope(const Driver& driver, DriverDevice number, Handle context) : driver_(driver), number_(number) {
  driver_.check(driver_.context_get_current(&before_), "read the current context");
  if (before_ != context) {
    driver_.check(driver_.context_set_current(context), "make the device's context current");
    changed_ = true;
  }
}

Driver::Scope::~Scope() {
  if (changed_) { // the program's current device is as it was
    driver_.context_set_current(before_);
  }
}

Driver::Scope Driver::enter(const at::Device& device) const {
  DriverDevice number = 0;
  check(device_get(&number, device.index()), "find the device");
  // Retained once a device and process, and never released: torch holds it to the end as well.
  static std::mutex mutex;
  static auto* contexts = new std::map<std::pair<const Driver*, DriverDevice>, Handle>;
  Handle wanted = nullptr;
  {
    const std::lock_guard<std::mutex> lock(mutex);
    auto& context = (*contexts)[{this, number}];
    if (context == nullptr) {
      check(device_primary_context_retain(&context, number), "use the device's primary context");
    }
    wanted = context;
  }
  return Scope(*this, number, wanted);
}

const Compiler& Compiler::of(at::DeviceType type) {
  const std::lock_guard<std::mutex> lock(drivers().mutex);
  return known(type).open_compiler();
}

void Compiler::check(DriverResult code, const char* what) const {
  TORCH_CHECK(code == 0, "fog: cannot ", what, ": ", error_string(code), " (nvrtcResult ", code, ")");
}

std::string Compiler::compile(const char* source, int major, int minor) const {
  Handle program = nullptr;
  check(create(&program, source, "kernels.cuh", 0, nullptr, nullptr), "prepare the device's kernels");
  const std::string architecture = c10::str("--gpu-architecture=sm_", major, minor);
  // No fused multiply-add: results have the same bits as on the CPU.
  const char* options[] = {architecture.c_str(), "--std=c++17", "--fmad=false"};
  const auto outcome = compile_program(program, 3, options);
  std::string log;
  if (outcome != 0) {
    size_t length = 0;
    if (log_size(program, &length) == 0 && length > 1) {
      log.resize(length);
      program_log(program, log.data());
    }
    destroy(&program);
    TORCH_CHECK(false, "fog: cannot compile the device's kernels for ", architecture, ": ", error_string(outcome), "\n", log.c_str());
  }
  std::string code;
  size_t length = 0;
  check(cubin_size(program, &length), "read the device's kernels");
  code.resize(length);
  check(cubin(program, code.data()), "read the device's kernels");
  destroy(&program);
  return code;
}

} // namespace fog::cuda
