#include "core/timeline.hpp"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cerrno>
#include <cinttypes>
#include <cstring>
#include <fstream>
#include <new>
#include <system_error>

#include <c10/util/Exception.h>
#include <c10/util/Logging.h>
#include <c10/util/thread_name.h>

namespace fog {
namespace {

constexpr auto kWriteInterval = std::chrono::milliseconds(500);
// Limit of entries that wait to be written. Further entries are dropped and counted.
constexpr size_t kMostRecorded = size_t(1) << 20;
// Named tracks have numbers from here on, above those of lanes.
constexpr int kFirstTrack = 1000;

int64_t nanoseconds(Timeline::Clock::time_point time) {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(time.time_since_epoch()).count();
}

// Trace events count in microseconds.
void print_microseconds(std::FILE* file, int64_t nanoseconds) {
  std::fprintf(file, "%" PRId64 ".%03d", nanoseconds / 1000, static_cast<int>(nanoseconds % 1000));
}

// All processes of one kernel share a clock, including those in containers and network namespaces.
std::string clock_id(const std::string& host) {
  std::ifstream file("/proc/sys/kernel/random/boot_id");
  std::string id;
  return file >> id ? id : host;
}

// Memory straight from the system.
class MappedMemory final : public std::pmr::memory_resource {
  void* do_allocate(size_t bytes, size_t /*alignment: a page suffices*/) override {
    void* memory = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED) {
      throw std::bad_alloc();
    }
    return memory;
  }
  void do_deallocate(void* memory, size_t bytes, size_t) override {
    munmap(memory, bytes);
  }
  bool do_is_equal(const std::pmr::memory_resource& other) const noexcept override {
    return this == &other;
  }
};

class Span final : public Timeline::Entry {
 public:
  Span(std::string_view track, std::string_view name, Timeline::Clock::time_point begin, Timeline::Clock::time_point end)
      : track_(Timeline::text(track)), name_(Timeline::text(name)), begin_(begin), end_(end) {}

  void write(Timeline::Writer& writer) const override {
    writer.slice_on(track_, name_, "activity", begin_, end_);
  }

 private:
  const Timeline::Text track_;
  const Timeline::Text name_;
  const Timeline::Clock::time_point begin_;
  const Timeline::Clock::time_point end_;
};

} // namespace

std::atomic<bool> Timeline::on_{false};

std::string json_string(std::string_view text) {
  std::string result = "\"";
  for (const char letter : text) {
    if (letter == '"' || letter == '\\') {
      result += '\\';
      result += letter;
    } else if (static_cast<unsigned char>(letter) < 0x20) {
      char escaped[8];
      std::snprintf(escaped, sizeof(escaped), "\\u%04x", static_cast<unsigned>(letter));
      result += escaped;
    } else {
      result += letter;
    }
  }
  return result + '"';
}

// --- the writer ---

void Timeline::Writer::name_track(int track, const std::string& name) {
  std::fprintf(
      file_,
      ",\n{\"name\": \"thread_name\", \"ph\": \"M\", \"pid\": %d, \"tid\": %d, \"args\": {\"name\": %s}}"
      ",\n{\"name\": \"thread_sort_index\", \"ph\": \"M\", \"pid\": %d, \"tid\": %d, \"args\": {\"sort_index\": %d}}",
      rank_, track, json_string(name).c_str(), rank_, track, track);
}

void Timeline::Writer::slice(
    std::string_view name, const char* category, Clock::time_point begin, Clock::time_point end, std::string_view arguments) {
  for (; named_lanes_ <= lane_; ++named_lanes_) {
    name_track(named_lanes_, "operations " + std::to_string(named_lanes_));
  }
  slice(lane_, name, category, begin, end, arguments);
}

void Timeline::Writer::slice_on(
    std::string_view track, std::string_view name, const char* category, Clock::time_point begin, Clock::time_point end) {
  const auto [found, is_new] = tracks_.emplace(std::string(track), kFirstTrack + static_cast<int>(tracks_.size()));
  if (is_new) {
    name_track(found->second, found->first);
  }
  slice(found->second, name, category, begin, end, "");
}

void Timeline::Writer::slice(
    int track,
    std::string_view name,
    const char* category,
    Clock::time_point begin,
    Clock::time_point end,
    std::string_view arguments) {
  std::fprintf(
      file_, ",\n{\"name\": %s, \"cat\": \"%s\", \"ph\": \"X\", \"pid\": %d, \"tid\": %d, \"ts\": ", json_string(name).c_str(),
      category, rank_, track);
  print_microseconds(file_, nanoseconds(begin));
  std::fputs(", \"dur\": ", file_);
  print_microseconds(file_, nanoseconds(end) - nanoseconds(begin));
  if (!arguments.empty()) {
    std::fprintf(file_, ", \"args\": {%.*s}", static_cast<int>(arguments.size()), arguments.data());
  }
  std::fputc('}', file_);
}

// --- the timeline ---

std::pmr::memory_resource* Timeline::memory() {
  static auto* memory = new std::pmr::synchronized_pool_resource(new MappedMemory());
  return memory;
}

Timeline*& Timeline::of_process() {
  static auto* timeline = new Timeline();
  return timeline;
}

void Timeline::start(const std::string& prefix, int rank, int size, const std::string& host) {
  const std::lock_guard<std::mutex> starting(starting_);
  TORCH_CHECK_VALUE(!thread_.joinable(), "timeline: got '", prefix, "', but there is a timeline already, '", path(), "'");
  const auto path = prefix + std::to_string(rank) + ".json";
  // Others may write to the folder, so a link that lies there leads nowhere.
  const int fd = open(path.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC | O_NOFOLLOW, 0666);
  auto* file = fd < 0 ? nullptr : fdopen(fd, "w");
  TORCH_CHECK_VALUE(
      file != nullptr, "timeline: got '", prefix, "'; the file '", path,
      "' cannot be written: ", std::generic_category().message(errno));
  // Ranks of one host share a clock. Between hosts the wall clock is the first estimate.
  const auto steady = Clock::now();
  const auto wall = std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::system_clock::now().time_since_epoch()).count();
  std::fprintf(
      file,
      "[\n{\"name\": \"fog_timeline\", \"ph\": \"M\", \"pid\": %d, \"args\": {\"rank\": %d, \"size\": %d, \"host\": %s, \"clock\": %s, \"process\": %d, "
      "\"wall_clock_ns_at_zero\": %" PRId64
      "}}"
      ",\n{\"name\": \"process_name\", \"ph\": \"M\", \"pid\": %d, \"args\": {\"name\": %s}}"
      ",\n{\"name\": \"process_sort_index\", \"ph\": \"M\", \"pid\": %d, \"args\": {\"sort_index\": %d}}",
      rank, rank, size, json_string(host).c_str(), json_string(clock_id(host)).c_str(), static_cast<int>(getpid()),
      wall - nanoseconds(steady), rank, json_string("rank " + std::to_string(rank) + " on " + host).c_str(), rank, rank);
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    file_ = file;
    rank_ = rank;
    path_ = path;
    stopping_ = false;
    dropped_ = 0;
    recorded_.clear();
    lanes_.clear();
    ++timelines_;
  }
  try {
    thread_ = std::thread([this] { write_all(); });
  } catch (const std::system_error& error) {
    std::fclose(file);
    const std::lock_guard<std::mutex> lock(mutex_);
    file_ = nullptr;
    path_.clear();
    TORCH_CHECK_VALUE(false, "timeline: got '", prefix, "', but the system refuses this process a thread: ", error.what());
  }
  on_.store(true);
}

bool Timeline::stop() {
  const std::lock_guard<std::mutex> starting(starting_);
  if (!thread_.joinable()) {
    return false;
  }
  on_.store(false);
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    stopping_ = true;
  }
  stopping_signal_.notify_one();
  thread_.join();
  const std::lock_guard<std::mutex> lock(mutex_);
  recorded_.clear();
  path_.clear();
  return true;
}

std::string Timeline::path() {
  const std::lock_guard<std::mutex> lock(mutex_);
  return path_;
}

Timeline::Lane Timeline::take_lane(Clock::time_point begin) noexcept {
  const std::lock_guard<std::mutex> lock(mutex_);
  size_t number = 0;
  while (number < lanes_.size() && (lanes_[number].taken || lanes_[number].end > begin)) {
    ++number;
  }
  try {
    if (number == lanes_.size()) {
      lanes_.emplace_back();
    }
    lanes_[number].taken = true;
  } catch (const std::bad_alloc&) {
  }
  return {static_cast<int>(number), timelines_};
}

void Timeline::Lane::give_back() noexcept {
  if (const int number = std::exchange(number_, -1); number >= 0) {
    auto& timeline = instance();
    const std::lock_guard<std::mutex> lock(timeline.mutex_);
    if (timeline_ == timeline.timelines_ && static_cast<size_t>(number) < timeline.lanes_.size()) {
      timeline.lanes_[static_cast<size_t>(number)] = {false, Clock::now()};
    }
  }
}

void Timeline::add(const Lane& lane, std::unique_ptr<Entry> entry) noexcept {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (lane && lane.timeline_ != timelines_) {
    return;
  }
  try {
    if (recorded_.size() < kMostRecorded) {
      recorded_.push_back({lane.number_, std::move(entry)});
      return;
    }
  } catch (const std::bad_alloc&) {
  }
  ++dropped_;
}

void Timeline::add_span(const std::string& track, const std::string& name, Clock::time_point begin, Clock::time_point end) {
  if (is_on()) {
    add({}, std::make_unique<Span>(track, name, begin, end));
  }
}

void Timeline::write_all() {
  c10::setThreadName("fog_timeline");
  try {
    write_until_stopped();
  } catch (const std::exception& error) { // out of memory
    on_.store(false);
    LOG(WARNING) << "fog: the timeline ends here: " << error.what();
  }
  std::fclose(file_);
  file_ = nullptr;
}

void Timeline::write_until_stopped() {
  Writer writer(file_, rank_);
  bool broken = false;
  for (bool last = false; !last;) {
    std::pmr::vector<Recorded> recorded(memory());
    uint64_t dropped = 0;
    {
      std::unique_lock<std::mutex> lock(mutex_);
      stopping_signal_.wait_for(lock, kWriteInterval, [this] { return stopping_; });
      last = stopping_;
      recorded.swap(recorded_);
      dropped = dropped_;
    }
    if (broken) {
      continue;
    }
    for (const auto& each : recorded) {
      writer.lane_ = each.lane;
      each.entry->write(writer);
    }
    if (last && dropped > 0) {
      std::fprintf(
          file_, ",\n{\"name\": \"fog_dropped\", \"ph\": \"M\", \"pid\": %d, \"args\": {\"entries\": %" PRIu64 "}}", rank_, dropped);
    }
    if (last) {
      std::fputs("\n]\n", file_);
    }
    if (std::fflush(file_) != 0 || std::ferror(file_) != 0) {
      broken = true;
      on_.store(false);
      LOG(WARNING) << "fog: the timeline '" << path() << "' ends here: it cannot be written: " << std::strerror(errno);
    }
  }
}

} // namespace fog
