// One rank's worklist, shared by the C++ tests.
#pragma once

#include <algorithm>
#include <vector>

#include "core/schedule/worklist.hpp"
#include "support/check.hpp"
#include "support/plans.hpp"

// A worklist with arrays of exactly the capacities that worklist.hpp states.
struct WorklistArrays {
  WorklistArrays(const PlanCase& c, const uec::Schedule& s, int32_t rank)
      : tasks(max_tasks(c, c.num_local_experts()[rank] + c.slots_per_rank)),
        pieces(c.num_local_experts()[rank] + c.num_replicas() + c.slots_per_rank),
        destinations(c.num_replicas() + c.slots_per_rank * c.num_ranks),
        expected(destinations.size()),
        opens(c.num_ranks),
        involved(c.num_ranks),
        needs(c.num_ranks) {
    list.tasks = tasks.data();
    list.pieces = pieces.data();
    list.destinations = destinations.data();
    list.expected = expected.data();
    list.opens = opens.data();
    list.involved = involved.data();
    list.needs = needs.data();
    const std::vector<int32_t> local_idx = c.local_idx();
    uec::build_worklist(uec::SingleThread{}, c.topology(), s, local_idx.data(), rank, list);
    CHECK(list.num_tasks <= static_cast<int32_t>(tasks.size()));
    CHECK(list.num_pieces <= static_cast<int32_t>(pieces.size()));
    CHECK(list.num_destinations <= static_cast<int32_t>(destinations.size()));
    CHECK(list.num_expected <= static_cast<int32_t>(expected.size()));
  }

  static int32_t max_tasks(const PlanCase& c, int32_t instances) {
    return std::min(instances * c.num_domains(),
                    std::max(instances, c.num_ranks * c.slots_per_rank));
  }

  std::vector<uec::Task> tasks;
  std::vector<uec::Piece> pieces;
  std::vector<uec::Destination> destinations;
  std::vector<uec::Expected> expected;
  std::vector<uint8_t> opens, involved, needs;
  uec::Worklist list;
};
