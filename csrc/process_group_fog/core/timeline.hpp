// The timeline of this process: a file in the Trace Event Format, which Perfetto and chrome://tracing show. Callers add
// entries. A separate thread turns them into text and writes them, so recording costs only a few hundred nanoseconds.
// If the file cannot be written any more (a full disk), the timeline ends and the program goes on.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <cstdio>
#include <memory>
#include <memory_resource>
#include <mutex>
#include <string>
#include <string_view>
#include <thread>
#include <unordered_map>
#include <utility>
#include <vector>

namespace fog {

class Timeline {
 public:
  using Clock = std::chrono::steady_clock;

  // Writes slices. Only the timeline's thread has a writer.
  class Writer;
  // Memory of entries, apart from the heap. Entries live for up to half a second. On the heap they would lie between
  // the large tensors of a training step, whose memory the allocator would then return to the system and fetch again in
  // every step.
  static std::pmr::memory_resource* memory();
  // A text of an entry.
  using Text = std::pmr::string;
  static Text text(std::string_view text) {
    return Text(text, memory());
  }
  // An event that has ended and will be written.
  class Entry {
   public:
    virtual ~Entry() = default;
    virtual void write(Writer& writer) const = 0;
    static void* operator new(size_t size) {
      return memory()->allocate(size);
    }
    static void operator delete(void* entry, size_t size) {
      memory()->deallocate(entry, size);
    }
  };

  // Returns the timeline of this process. It is never destroyed.
  static Timeline& instance() {
    return *of_process();
  }
  // Returns whether events are recorded. It costs one load from memory.
  static bool is_on() {
    return on_.load(std::memory_order_relaxed);
  }

  // Opens the file `prefix` + rank + ".json". Throws ValueError if a timeline is open already, or if the file cannot be
  // opened.
  void start(const std::string& prefix, int rank, int size, const std::string& host);
  // Writes the remaining entries and closes the file. Returns false if no timeline is open.
  bool stop();
  // A forked child begins with a new one: it has a copy of its parent's memory, but not the thread, and locks may be held.
  static void forget_in_child() {
    on_.store(false);
    of_process() = new Timeline();
  }
  // Returns the path of the file; empty if there is none.
  std::string path();

  // Slices that overlap are in different lanes. A lane is given back when the object ends.
  class Lane {
   public:
    Lane() = default;
    Lane(Lane&& other) noexcept : number_(std::exchange(other.number_, -1)), timeline_(other.timeline_) {}
    Lane& operator=(Lane&& other) noexcept {
      give_back();
      number_ = std::exchange(other.number_, -1);
      timeline_ = other.timeline_;
      return *this;
    }
    ~Lane() {
      give_back();
    }
    explicit operator bool() const {
      return number_ >= 0;
    }
    // Its last slice ends now.
    void give_back() noexcept;

   private:
    friend class Timeline;
    Lane(int number, uint32_t timeline) : number_(number), timeline_(timeline) {}

    int number_ = -1; // -1: no lane
    uint32_t timeline_ = 0; // the number of the timeline in this process that the lane belongs to
  };
  // Returns the lowest lane that is free from `begin` on. If there is no memory for a new lane, returns one that is not
  // free.
  Lane take_lane(Clock::time_point begin) noexcept;
  // Drops the entry if there is no memory for it, or if the lane belongs to an earlier timeline.
  void add(const Lane& lane, std::unique_ptr<Entry> entry) noexcept;
  // Adds a named slice to a track of its own, such as a user's activity. The slices of a track must nest.
  void add_span(const std::string& track, const std::string& name, Clock::time_point begin, Clock::time_point end);

 private:
  Timeline() = default;
  struct Recorded {
    int lane;
    std::unique_ptr<Entry> entry;
  };
  static std::atomic<bool> on_;
  static Timeline*& of_process();

  void write_all();
  void write_until_stopped();

  std::mutex starting_; // serializes start() and stop()
  std::mutex mutex_; // guards the members below
  std::condition_variable stopping_signal_;
  bool stopping_ = false;
  std::pmr::vector<Recorded> recorded_{memory()};
  uint64_t dropped_ = 0; // entries that were dropped because the file is slower than the program
  struct State {
    bool taken = false;
    Clock::time_point end; // end of its last slice
  };
  std::vector<State> lanes_;
  uint32_t timelines_ = 0; // number of timelines so far
  std::string path_;
  std::thread thread_;
  // Only the thread uses this while it runs.
  std::FILE* file_ = nullptr;
  int rank_ = 0;
};

class Timeline::Writer {
 public:
  Writer(std::FILE* file, int rank) : file_(file), rank_(rank) {}

  // Writes a slice to the lane that the entry was added to. `arguments` are members of a JSON object, such as
  // "\"bytes\": 12"; may be empty.
  void slice(
      std::string_view name, const char* category, Clock::time_point begin, Clock::time_point end, std::string_view arguments = "");
  // Writes a slice to a named track.
  void slice_on(std::string_view track, std::string_view name, const char* category, Clock::time_point begin, Clock::time_point end);

 private:
  friend class Timeline;
  void name_track(int track, const std::string& name);
  void slice(
      int track,
      std::string_view name,
      const char* category,
      Clock::time_point begin,
      Clock::time_point end,
      std::string_view arguments);

  std::FILE* const file_;
  const int rank_;
  int lane_ = 0;
  int named_lanes_ = 0;
  std::unordered_map<std::string, int> tracks_;
};

// Returns a JSON string with its quotes.
std::string json_string(std::string_view text);

} // namespace fog
