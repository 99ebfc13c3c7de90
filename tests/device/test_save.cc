// The save kernel on the emulated device: what it copies, and entries that are in use.
#include <vector>

#include "cuda/device/save.cuh"
#include "support/check.hpp"
#include "support/watchdog.hpp"

namespace {

using uec::cuda::SaveArgs;
using uec::cuda::SaveFaultBox;

// An entry, what its saves copy, and what is reported to the host.
struct Entry {
  explicit Entry(int32_t size) : to(size + 2, 77), from(size) {}

  void save(uint64_t generation, int32_t value, bool marks = true) {
    for (size_t i = 0; i < from.size(); ++i) from[i] = value + static_cast<int32_t>(i);
    SaveArgs args{.num_fields = 2,
                  .in_use = marks ? address(&in_use) : 0,
                  .generation = generation,
                  .tag = 100 + generation,
                  .fault = address(&fault)};
    // The second is one word in front of the first.
    args.fields[0] = {address(to.data() + 1), address(from.data()),
                      static_cast<int32_t>(from.size())};
    args.fields[1] = {address(to.data()), address(from.data()), from.empty() ? 0 : 1};
    run(args);
  }
  void clear() { run(SaveArgs{.in_use = address(&in_use), .fault = address(&fault)}); }

  bool holds(int32_t value) const {
    for (size_t i = 0; i < from.size(); ++i)
      if (to[1 + i] != value + static_cast<int32_t>(i)) return false;
    return to.back() == 77 && to.front() == (from.empty() ? 77 : value);
  }

  static uint64_t address(const void* at) { return reinterpret_cast<uint64_t>(at); }
  static void run(const SaveArgs& args) {
    emulation::launch("ultraep_save_plan", args,
                      {.shared_bytes = uec::cuda::kSaveSharedBytes, .warps = 2},
                      [&](std::byte* memory) { uec::cuda::save_plan(args, memory); });
  }

  std::vector<int32_t> to, from;
  uint64_t in_use = 0;
  SaveFaultBox fault;
};

void check_copies() {
  for (const int32_t size : {0, 1, 3, 4, 63, 64, 65, 1000}) {
    Entry entry(size);
    for (int32_t value = 1; value < 4; ++value) {  // the host keeps account: nothing is in use
      entry.save(0, value, false);
      CHECK(entry.holds(value));
    }
    CHECK_EQ(entry.fault.tag, 0);
  }
}

void check_turns() {
  Entry entry(70);
  entry.save(5, 1);
  CHECK_EQ(entry.in_use, 5);
  CHECK(entry.holds(1));
  entry.save(5, 2);  // the first is in use
  CHECK(entry.holds(1));
  CHECK_EQ(entry.fault.tag, 105);
  CHECK_EQ(entry.fault.generation, 5);
  entry.fault = {};
  entry.clear();
  CHECK_EQ(entry.in_use, 0);
  CHECK(entry.holds(1));
  entry.save(5, 3);
  CHECK(entry.holds(3));
  CHECK_EQ(entry.fault.tag, 0);
}

void check_owners() {
  Entry entry(4);
  entry.save(5, 1);
  entry.save(8, 2);  // the entry has been given up, and taken
  CHECK(entry.holds(2));
  CHECK_EQ(entry.in_use, 8);
  CHECK_EQ(entry.fault.tag, 0);
  entry.save(5, 3);  // a graph that should be gone
  CHECK(entry.holds(2));
  CHECK_EQ(entry.in_use, 8);
  CHECK_EQ(entry.fault.tag, 105);
  entry.save(8, 4);  // the host has not taken the first yet
  CHECK(entry.holds(2));
  CHECK_EQ(entry.fault.tag, 105);
  CHECK_EQ(entry.fault.generation, 5);
}

}  // namespace

int main() {
  const Watchdog watchdog("a launch that does not end");
  check_copies();
  check_turns();
  check_owners();
}
