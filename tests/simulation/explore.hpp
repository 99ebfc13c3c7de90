// Which schedules are tried: seeded random ones, and for small cases all of them.
#pragma once

#include <string>

#include "simulation/ranks.hpp"

namespace sim {

struct Outcome {
  Property property = Property::kNone;  // the first that was violated
  std::string detail{};
  uint64_t schedules = 0;  // random: tried, with the one that failed
  uint64_t states = 0;     // exhaustive: different ones
  uint64_t steps = 0;
  int32_t max_lead = 0;  // calls between the fastest rank and the slowest
  bool complete = true;  // exhaustive: no limit was reached
};

// Schedules with seeds seed, seed + 1, ... Each has its own temper: which ranks, bytes and flags
// are fast, slow, or do not move at all while anything else does.
Outcome explore_random(Simulation& simulation, uint64_t seed, uint64_t schedules);

// Every schedule that is not a mere reordering of independent steps of another, each state once.
// States are distinguished by a 64-bit hash.
Outcome explore_all(Simulation& simulation, uint64_t max_states);

}  // namespace sim
