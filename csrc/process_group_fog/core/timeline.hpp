// The timeline of this process: a file in the Trace Event Format, which Perfetto and chrome://tracing show. Whoever records adds entries; a thread
// of its own turns them into text and writes them, so that recording costs a few hundred nanoseconds. A file that cannot be written any more
// (a full disk) ends the timeline, not the program.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <cstdio>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <unordered_map>
#include <vector>

namespace fog {

class Timeline {
 public:
  using Clock = std::chrono::steady_clock;

  // Writes slices; only the timeline's thread has one.
  class Writer;
  // Something that has ended and is to be written.
  class Entry {
   public:
    virtual ~Entry() = default;
    virtual void write(Writer& writer) const = 0;
  };

  // This process's; it lives until the process ends.
  static Timeline& instance();
  // Whether anything is recorded; a load from memory.
  static bool is_on() {
    return on_.load(std::memory_order_relaxed);
  }

  // Begins the file `prefix` + rank + ".json". Throws ValueError if there is a timeline already, or if that file cannot be made.
  void start(const std::string& prefix, int rank, int size, const std::string& host);
  // Writes what there is and closes the file. False if there is none.
  bool stop();
  // A fork has its parent's memory, but neither the thread nor a file of its own.
  static void forget_in_child() {
    on_.store(false);
  }
  // The file; empty if there is none.
  std::string path();

  // Slices that overlap lie in lanes of their own.
  struct Lane {
    int number = -1; // none
    uint32_t timeline = 0; // the how manieth of this process it is of
  };
  // The lowest lane that is free from `begin` on. Without memory for another one, one that is not.
  Lane take_lane(Clock::time_point begin) noexcept;
  // Its last slice ended at `end`.
  void return_lane(const Lane& lane, Clock::time_point end) noexcept;
  // It is left out if there is no memory for it, or if the lane is an earlier timeline's.
  void add(const Lane& lane, std::unique_ptr<Entry> entry) noexcept;
  // A slice with a name on a track of its own, such as a user's activity. Those of one track must nest.
  void add_span(const std::string& track, const std::string& name, Clock::time_point begin, Clock::time_point end);

 private:
  Timeline() = default;
  struct Recorded {
    int lane;
    std::unique_ptr<Entry> entry;
  };
  static std::atomic<bool> on_;

  void write_all();
  void write_until_stopped();

  std::mutex starting_; // start() and stop()
  std::mutex mutex_; // of what follows
  std::condition_variable stopping_signal_;
  bool stopping_ = false;
  std::vector<Recorded> recorded_;
  uint64_t dropped_ = 0; // as the file was slower than the program
  struct State {
    bool taken = false;
    Clock::time_point end; // of its last slice
  };
  std::vector<State> lanes_;
  uint32_t timelines_ = 0; // so far
  std::string path_;
  std::thread thread_;
  // The thread's own, while it runs.
  std::FILE* file_ = nullptr;
  int rank_ = 0;
};

class Timeline::Writer {
 public:
  Writer(std::FILE* file, int rank) : file_(file), rank_(rank) {}

  // A slice of the lane that the entry was added to. `arguments`: members of a JSON object, such as "\"bytes\": 12"; may be empty.
  void slice(
      const std::string& name, const char* category, Clock::time_point begin, Clock::time_point end, const std::string& arguments = "");
  // The same on a track with a name.
  void slice_on(
      const std::string& track, const std::string& name, const char* category, Clock::time_point begin, Clock::time_point end);

 private:
  friend class Timeline;
  void name_track(int track, const std::string& name);
  void slice(
      int track,
      const std::string& name,
      const char* category,
      Clock::time_point begin,
      Clock::time_point end,
      const std::string& arguments);

  std::FILE* const file_;
  const int rank_;
  int lane_ = 0;
  int named_lanes_ = 0;
  std::unordered_map<std::string, int> tracks_;
};

// A JSON string with its quotes.
std::string quoted(const std::string& text);

} // namespace fog
