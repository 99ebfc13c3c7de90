// The cases that are simulated: a few with names, and any number of random ones.
#pragma once

#include "simulation/case.hpp"

namespace sim {

// Small cases, one for each fault that few steps can show. All of them end as they are meant
// to in every schedule.
std::vector<Case> named_cases();

// Small enough for every interleaving.
std::vector<Case> exhaustive_cases();

// Any group, plans, payload, workers, and ending.
Case draw_case(Random& random);

}  // namespace sim
