#include "cuda/kernels.hpp"

#include <algorithm>
#include <cctype>
#include <map>
#include <mutex>
#include <string>

#include <c10/util/Exception.h>

#include "core/linear_combination.hpp"

namespace fog::cuda {
namespace {

constexpr unsigned kBlock = 256; // threads
constexpr size_t kBlocksOfProcessor = 8; // 2048 threads: all that a multiprocessor holds

struct Loaded {
  std::mutex mutex;
  Handle module = nullptr;
  std::map<std::string, Handle> functions;
  size_t most_blocks = 0;
};

Loaded& loaded_on(const at::Device& device) {
  static std::mutex mutex;
  static auto* all =
      new std::map<at::Device, Loaded*, bool (*)(const at::Device&, const at::Device&)>([](const at::Device& a, const at::Device& b) {
        return std::make_pair(a.type(), a.index()) < std::make_pair(b.type(), b.index());
      });
  const std::lock_guard<std::mutex> lock(mutex);
  auto& loaded = (*all)[device];
  if (loaded == nullptr) {
    loaded = new Loaded; // the process's end needs no order
  }
  return *loaded;
}

// With the lock, in the device's context.
void load(Loaded& loaded, const at::Device& device, const Driver& driver, DriverDevice number) {
  if (loaded.module != nullptr) {
    return;
  }
  const auto attribute = [&](int which) {
    int value = 0;
    driver.check(driver.device_get_attribute(&value, which, number), "ask for the device's properties");
    return value;
  };
  loaded.most_blocks = kBlocksOfProcessor * static_cast<size_t>(attribute(kMultiprocessorCount));
  const auto code =
      Compiler::of(device.type()).compile(kernel_source(), attribute(kComputeCapabilityMajor), attribute(kComputeCapabilityMinor));
  Handle module = nullptr;
  driver.check(driver.module_load_data(&module, code.data()), "load the device's kernels");
  for (const auto& name : kernel_names()) {
    auto& function = loaded.functions[name];
    driver.check(driver.module_get_function(&function, module, name.c_str()), "find a kernel");
    if (driver.function_load != nullptr) {
      driver.check(driver.function_load(function), "load a kernel");
    }
  }
  loaded.module = module;
}

// Without what comes before the type.
const char* type_in_kernels(c10::ScalarType dtype) {
  switch (dtype) {
    case c10::ScalarType::Half:
      return "float16";
    case c10::ScalarType::BFloat16:
      return "bfloat16";
    case c10::ScalarType::Float:
    case c10::ScalarType::ComplexFloat:
      return "float32";
    case c10::ScalarType::Double:
    case c10::ScalarType::ComplexDouble:
      return "float64";
    case c10::ScalarType::Char:
      return "int8";
    case c10::ScalarType::Short:
      return "int16";
    case c10::ScalarType::Int:
      return "int32";
    case c10::ScalarType::Long:
      return "int64";
    case c10::ScalarType::Byte:
      return "uint8";
    case c10::ScalarType::UInt16:
      return "uint16";
    case c10::ScalarType::UInt32:
      return "uint32";
    case c10::ScalarType::UInt64:
      return "uint64";
    default:
      TORCH_INTERNAL_ASSERT(false, "fog: dtype ", dtype, " passed its check but has no kernel");
  }
}

// A complex number is two.
unsigned long long elements_of(c10::ScalarType dtype, size_t numel) {
  return c10::isComplexType(dtype) ? 2 * numel : numel;
}

size_t threads_for(c10::ScalarType dtype, size_t elements) {
  const size_t lanes = std::max<size_t>(1, 16 / c10::elementSize(dtype)); // a thread's share
  return (elements + lanes - 1) / lanes;
}

} // namespace

const char* kernel_source() {
  return FOG_TEXT(FOG_KERNEL_TYPES) "\n"
#include "cuda/kernels.cuh"
      ;
}

std::vector<std::string> kernel_names() {
  const std::string source = kernel_source();
  std::vector<std::string> names;
  // The word after each of these.
  const auto collect = [&](const std::string& macro, const std::vector<std::string>& prefixes) {
    for (size_t at = source.find(macro); at != std::string::npos; at = source.find(macro, at + 1)) {
      if (source.compare(source.rfind('\n', at) + 1, 8, "#define ") == 0) {
        continue;
      }
      const auto begin = source.find_first_not_of(" \n", at + macro.size());
      auto end = begin;
      while (std::isalnum(static_cast<unsigned char>(source[end])) != 0 || source[end] == '_') {
        ++end;
      }
      for (const auto& prefix : source[end] == '#' ? std::vector<std::string>() : prefixes) { // a name that a macro makes
        names.push_back(prefix + source.substr(begin, end - begin));
      }
    }
  };
  collect("FOG_KERNEL(", {""});
  collect("FOG_COMBINE(", {"combine_", "sum_"});
  return names;
}

void prepare_kernels(const at::Device& device) {
  const auto& driver = Driver::of(device.type());
  const auto entered = driver.enter(device);
  auto& loaded = loaded_on(device);
  const std::lock_guard<std::mutex> lock(loaded.mutex);
  load(loaded, device, driver, entered.number());
}

void launch(const at::Device& device, const char* kernel, size_t threads, Handle stream, std::initializer_list<const void*> arguments) {
  const auto& driver = Driver::of(device.type());
  const auto entered = driver.enter(device);
  auto& loaded = loaded_on(device);
  Handle function = nullptr;
  {
    const std::lock_guard<std::mutex> lock(loaded.mutex);
    load(loaded, device, driver, entered.number());
    function = loaded.functions.at(kernel);
  }
  const size_t blocks = std::clamp<size_t>((threads + kBlock - 1) / kBlock, 1, loaded.most_blocks);
  const unsigned block = static_cast<unsigned>(std::clamp<size_t>(threads, 1, kBlock));
  std::vector<void*> pointers;
  for (const void* argument : arguments) {
    pointers.push_back(const_cast<void*>(argument)); // the driver's own type; it only reads
  }
  driver.check(
      driver.launch_kernel(function, static_cast<unsigned>(blocks), 1, 1, block, 1, 1, 0, stream, pointers.data(), nullptr),
      "start a kernel");
}

void launch_combine(
    const at::Device& device,
    c10::ScalarType dtype,
    void* out,
    c10::ArrayRef<const void*> rows,
    c10::ArrayRef<double> weights,
    bool mean,
    size_t numel,
    Handle stream,
    const int* failed) {
  TORCH_INTERNAL_ASSERT(rows.size() <= kMostRows, "fog: ", rows.size(), " rows in one sum");
  if (numel == 0) {
    return;
  }
  Rows packed{};
  std::copy(rows.begin(), rows.end(), packed.data);
  std::copy(weights.begin(), weights.end(), packed.weights);
  packed.count = static_cast<int>(rows.size());
  packed.mean = mean ? 1 : 0;
  packed.whole = std::all_of(weights.begin(), weights.end(), is_whole) ? 1 : 0;
  unsigned long long elements = elements_of(dtype, numel);
  const auto kernel = std::string("combine_") + type_in_kernels(dtype);
  launch(device, kernel.c_str(), threads_for(dtype, elements), stream, {&out, &packed, &elements, &failed});
}

void launch_sum(const at::Device& device, c10::ScalarType dtype, const Sum* sum, size_t numel, Handle stream, const int* failed) {
  if (numel == 0) {
    return;
  }
  unsigned long long elements = elements_of(dtype, numel);
  const auto kernel = std::string("sum_") + type_in_kernels(dtype);
  launch(device, kernel.c_str(), threads_for(dtype, elements), stream, {&sum, &elements, &failed});
}

} // namespace fog::cuda
