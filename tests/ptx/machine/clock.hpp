// What things cost, in cycles of a multiprocessor. Values come from a file of NAME=VALUE lines
// (clock_a.env, clock_b.env), each with its source there.
#pragma once

#include <cstdint>
#include <string>

namespace ptx_machine {

// What a warp waited for.
enum Wait : uint8_t {
  kWaitAlu,
  kWaitShared,
  kWaitL1,
  kWaitL2,
  kWaitRemote,
  kWaitHost,
  kWaitBarrier,
  kWaitFence
};
inline constexpr int kWaits = 8;
inline constexpr const char* kWaitNames[kWaits] = {"alu",    "shared", "l1",      "l2",
                                                   "remote", "host",   "barrier", "fence"};
// A wait of this many cycles or more is a trip to memory: the next cannot begin before it ends.
inline constexpr uint64_t kTrip = 21;

struct Costs {
  int64_t mhz = 1755;
  int64_t alu = 5, branch = 8, shuffle = 24, barrier = 30;
  // Of a dependent load.
  int64_t shared = 30, l1 = 38, l2 = 280, remote = 1400, host = 1800;
  int64_t fence_device = 250, fence_system = 500;
  int64_t atomic = 4;  // between atomics on one address
  int64_t bulk = 700;  // until a bulk copy's first byte; `remote` if it is a peer's
  int64_t bulk_bytes = 48, link_bytes = 404;  // a cycle: of a multiprocessor, of a link each way
  int64_t cluster = 180;                      // of a load from another block's shared memory

  static Costs read(const std::string& path);  // ends the program with status 2 if it cannot
  int64_t of(Wait wait) const {
    const int64_t costs[kWaits] = {alu, shared, l1, l2, remote, host, barrier, fence_system};
    return costs[wait];
  }
  double nanoseconds(uint64_t cycles) const {
    return static_cast<double>(cycles) * 1000 / static_cast<double>(mhz);
  }
};

}  // namespace ptx_machine
