#include "core/reroute/reroute.hpp"

#include <nanobind/stl/tuple.h>

#include <algorithm>
#include <memory>
#include <numeric>
#include <string>
#include <tuple>

#include "arrays.hpp"
#include "bind.hpp"
#include "unlocked.hpp"

namespace nb = nanobind;

namespace uec::python {
namespace {

template <typename Id>
using Ids = nb::ndarray<const Id, nb::c_contig, nb::device::cpu>;
template <typename Id>
using IdsOut = nb::ndarray<Id, nb::c_contig, nb::device::cpu>;

using Matrix = Input<int32_t, 2>;
using Row = Input<int32_t, 1>;

// A plan, after a check of its arrays' shapes, with one source rank's scratch memory.
class Source {
 public:
  Source(const Matrix& load, const Matrix& slot_expert, const Matrix& slot_quota,
         const Row& home_quota, const Row& home, int32_t rank)
      : topology_{.num_ranks = static_cast<int32_t>(load.shape(0)),
                  .num_experts = static_cast<int32_t>(load.shape(1)),
                  .slots_per_rank = static_cast<int32_t>(slot_expert.shape(1)),
                  .home = home.data()},
        plan_{.load = load.data(),
              .slot_expert = slot_expert.data(),
              .slot_quota = slot_quota.data(),
              .home_quota = home_quota.data()},
        rank_(rank) {
    require_equal("length of home", home.size(), topology_.num_experts);
    require_equal("length of home_quota", home_quota.size(), topology_.num_experts);
    require_equal("rows of slot_expert", slot_expert.shape(0), topology_.num_ranks);
    require_equal("rows of slot_quota", slot_quota.shape(0), topology_.num_ranks);
    require_equal("columns of slot_quota", slot_quota.shape(1), topology_.slots_per_rank);
    require_homes(topology_);
    if (rank < 0 || rank >= topology_.num_ranks) {
      reject("rank", rank, "0 to " + std::to_string(topology_.num_ranks - 1));
    }
    memory_ = std::make_unique_for_overwrite<std::byte[]>(
        static_cast<size_t>(reroute_scratch_bytes(topology_)));
  }

  RerouteStatus compute() const { return compute_shares(topology_, plan_, rank_, scratch()); }
  RerouteScratch scratch() const { return RerouteScratch(topology_, memory_.get()); }
  const Topology& topology() const { return topology_; }

  // Tokens that leave the source; only valid after compute() found no fault.
  int64_t num_tokens() const {
    const int32_t* row = plan_.load + static_cast<int64_t>(rank_) * topology_.num_experts;
    return std::accumulate(row, row + topology_.num_experts, int64_t{0});
  }

 private:
  Topology topology_;
  QuotaPlan plan_;
  int32_t rank_;
  std::unique_ptr<std::byte[]> memory_;
};

template <typename Id>
RerouteStatus reroute(const Ids<Id>& topk_ids, const Matrix& load, const Matrix& slot_expert,
                      const Matrix& slot_quota, const Row& home_quota, const Row& home,
                      int32_t rank, const IdsOut<Id>& out) {
  const Source source(load, slot_expert, slot_quota, home_quota, home, rank);
  require_equal("size of out", out.size(), static_cast<int64_t>(topk_ids.size()));

  const Unlocked unlocked;
  const RerouteStatus status = source.compute();
  if (status.fault != RerouteFault::kNone) return status;
  return reroute_tokens(topk_ids.data(), static_cast<int64_t>(topk_ids.size()),
                        source.topology().num_experts, source.scratch(), out.data());
}

std::tuple<RerouteStatus, Output<int64_t>> reroute_map_numpy(
    const Input<uint8_t, 2>& routing_map, const Matrix& load, const Matrix& slot_expert,
    const Matrix& slot_quota, const Row& home_quota, const Row& home, int32_t rank) {
  const Source source(load, slot_expert, slot_quota, home_quota, home, rank);
  require_equal("columns of routing_map", routing_map.shape(1), source.topology().num_experts);

  RerouteStatus status;
  std::unique_ptr<int64_t[]> moves;
  size_t num_moves = 0;
  {
    const Unlocked unlocked;
    status = source.compute();
    if (status.fault == RerouteFault::kNone) {
      // A map too small for the load is a fault: do not allocate for the load then.
      num_moves = std::min(static_cast<size_t>(source.num_tokens()), routing_map.size());
      moves = std::make_unique_for_overwrite<int64_t[]>(2 * num_moves);
      status = reroute_map(source.topology(), routing_map.data(),
                           static_cast<int64_t>(routing_map.shape(0)), source.scratch(),
                           moves.get(), moves.get() + num_moves);
    }
  }
  return {status, to_numpy(std::move(moves), {2, num_moves})};
}

#define PLAN_ARRAYS                                                      \
  "load: ndarray[dtype=int32], slot_expert: ndarray[dtype=int32], "      \
  "slot_quota: ndarray[dtype=int32], home_quota: ndarray[dtype=int32], " \
  "home: ndarray[dtype=int32], rank: int"

template <typename Id>
void bind_ids(nb::module_& m, const char* signature) {
  m.def("reroute", &reroute<Id>, nb::arg("topk_ids").noconvert(), nb::arg("load").noconvert(),
        nb::arg("slot_expert").noconvert(), nb::arg("slot_quota").noconvert(),
        nb::arg("home_quota").noconvert(), nb::arg("home").noconvert(), nb::arg("rank"),
        nb::arg("out").noconvert(), nb::sig(signature),
        "Writes physical ids to `out`, which is undefined after a fault.");
}

}  // namespace

void bind_reroute(nb::module_& m) {
  nb::class_<RerouteStatus>(m, "RerouteStatus",
                            "The first fault found, or NONE; fields that do not apply are -1.")
      .def_ro("fault", &RerouteStatus::fault)
      .def_ro("expert", &RerouteStatus::expert)
      .def_ro("counted", &RerouteStatus::counted)
      .def_ro("expected", &RerouteStatus::expected)
      .def_ro("position", &RerouteStatus::position)
      .def_ro("value", &RerouteStatus::value);
  bind_ids<int32_t>(m, "def reroute(topk_ids: ndarray[dtype=int32], " PLAN_ARRAYS
                       ", out: ndarray[dtype=int32]) -> RerouteStatus");
  bind_ids<int64_t>(m, "def reroute(topk_ids: ndarray[dtype=int64], " PLAN_ARRAYS
                       ", out: ndarray[dtype=int64]) -> RerouteStatus");
  m.def("reroute_map", &reroute_map_numpy, nb::arg("routing_map").noconvert(),
        nb::arg("load").noconvert(), nb::arg("slot_expert").noconvert(),
        nb::arg("slot_quota").noconvert(), nb::arg("home_quota").noconvert(),
        nb::arg("home").noconvert(), nb::arg("rank"),
        nb::sig("def reroute_map(routing_map: ndarray[dtype=uint8], " PLAN_ARRAYS
                ") -> tuple[RerouteStatus, ndarray[dtype=int64]]"),
        "Returns (status, moves [2, N]); moves are flat positions in both maps.");
}

}  // namespace uec::python
