#include <pthread.h>

#include <chrono>
#include <filesystem>
#include <fstream>
#include <string>
#include <thread>

#include "bind.hpp"
#include "unlocked.hpp"

namespace nb = nanobind;
using namespace nb::literals;

namespace uec::python {
namespace {

// Whether gloo's collective threads are asleep. Such a thread releases a collective's tensors
// shortly after it has woken the waiter, and takes the GIL if it holds the last reference to a
// tensor that Python has seen. Short of destroying the process group, torch has no way to wait for
// that.
bool gloo_sleeps() {
  const std::string name = "(pt_gloo_runloop) ";
  std::error_code gone;
  for (const auto& thread : std::filesystem::directory_iterator("/proc/self/task", gone)) {
    std::string line;
    std::getline(std::ifstream(thread.path() / "stat"), line);
    const size_t at = line.find(name);
    if (at != std::string::npos && line[at + name.size()] != 'S') return false;
  }
  return true;
}

// Sampled three times: a thread may sleep briefly in between, for a mutex or a page fault.
bool gloo_rests() {
  for (int i = 0; i < 3; ++i) {
    if (!gloo_sleeps()) return false;
    std::this_thread::sleep_for(std::chrono::microseconds(200));
  }
  return true;
}

void drain_threads_at_exit(double seconds) {
  using Clock = std::chrono::steady_clock;
  const auto end = Clock::now() + std::chrono::duration<double>(seconds);
  Unlocked::end();
  const nb::gil_scoped_release release;
  while (Clock::now() < end && (Unlocked::num_outside() > 0 || !gloo_rests()))
    std::this_thread::sleep_for(std::chrono::microseconds(200));
}

}  // namespace

void bind_ending(nb::module_& m) {
  pthread_atfork(nullptr, nullptr, &Unlocked::forget_others);
  m.def("drain_threads_at_exit", &drain_threads_at_exit, "seconds"_a);
}

}  // namespace uec::python
