// The threads that run a step together.
//
// On the host and in the simulation a step is run by one thread. On a device a warp runs it: flags
// and pieces are looked at by its members side by side, since one member would need a memory's
// latency for each. All members of a team go through a step in the same way, with the same values,
// except inside a loop over `index(), index() + size(), ...`.
//
// A Team provides
//   int32_t index(), size()          this member, and how many there are
//   bool leader()                    one of them
//   void sync()                      what any member did before comes before what all do after
//   T share(T value)                 the leader's value, for all
//   T from(int32_t index, T value)   that member's value, for all
//   uint32_t lowest(uint32_t value)  the least of the members' values, for all
//   uint64_t sum_before(uint64_t value)  the sum of the values of the members with a lower index
// and the last four order as sync() does.
#pragma once

#include "core/common.hpp"

namespace uec {

// A team of one.
struct Alone {
  UEC_HD static constexpr int32_t index() { return 0; }
  UEC_HD static constexpr int32_t size() { return 1; }
  UEC_HD static constexpr bool leader() { return true; }
  UEC_HD static void sync() {}
  template <class T>
  UEC_HD static T share(T value) {
    return value;
  }
  template <class T>
  UEC_HD static T from(int32_t, T value) {
    return value;
  }
  UEC_HD static uint32_t lowest(uint32_t value) { return value; }
  UEC_HD static uint64_t sum_before(uint64_t) { return 0; }
};

}  // namespace uec
