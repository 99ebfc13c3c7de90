// The cases that are simulated: a few with names, and any number of random ones.
#pragma once

#include "simulation/case.hpp"

namespace sim {

// Small ones, one for each thing that can go wrong in few steps. All of them end as they are meant
// to in every schedule.
std::vector<Case> named_cases();

// Small enough for every interleaving.
std::vector<Case> exhaustive_cases();

// Any group, plans, payload, workers, and ending.
Case draw_case(Random& random);

// Each rank holds the home piece of its own expert and hub pieces of the others', with one worker:
// ranks that take a hub piece in hand and wait for it never send what the others wait for.
Case counter_example();

}  // namespace sim
