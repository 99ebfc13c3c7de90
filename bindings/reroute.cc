#include "core/reroute.hpp"

#include <memory>
#include <string>

#include "arrays.hpp"
#include "bind.hpp"

namespace nb = nanobind;

namespace uec::python {
namespace {

template <typename Id>
using Ids = nb::ndarray<const Id, nb::c_contig, nb::device::cpu>;
template <typename Id>
using IdsOut = nb::ndarray<Id, nb::c_contig, nb::device::cpu>;

template <typename Id>
RerouteStatus reroute(const Ids<Id>& topk_ids, const Input<int32_t, 2>& load,
                      const Input<int32_t, 2>& slot_expert, const Input<int32_t, 2>& slot_quota,
                      const Input<int32_t, 1>& home_quota, const Input<int32_t, 1>& home,
                      int32_t rank, const IdsOut<Id>& out) {
  const Topology topology{.num_ranks = static_cast<int32_t>(load.shape(0)),
                          .num_experts = static_cast<int32_t>(load.shape(1)),
                          .slots_per_rank = static_cast<int32_t>(slot_expert.shape(1)),
                          .home = home.data()};
  require_equal("length of home", home.size(), topology.num_experts);
  require_equal("length of home_quota", home_quota.size(), topology.num_experts);
  require_equal("rows of slot_expert", slot_expert.shape(0), topology.num_ranks);
  require_equal("rows of slot_quota", slot_quota.shape(0), topology.num_ranks);
  require_equal("columns of slot_quota", slot_quota.shape(1), topology.slots_per_rank);
  require_equal("size of out", out.size(), static_cast<int64_t>(topk_ids.size()));
  require_homes(topology);
  if (rank < 0 || rank >= topology.num_ranks) {
    reject("rank", rank, "0 to " + std::to_string(topology.num_ranks - 1));
  }

  nb::gil_scoped_release release;
  const auto memory = std::make_unique_for_overwrite<std::byte[]>(
      static_cast<size_t>(reroute_scratch_bytes(topology)));
  const RerouteScratch scratch(topology, memory.get());
  const QuotaPlan plan{.load = load.data(),
                       .slot_expert = slot_expert.data(),
                       .slot_quota = slot_quota.data(),
                       .home_quota = home_quota.data()};
  const RerouteStatus status = compute_shares(topology, plan, rank, scratch);
  if (status.fault != RerouteFault::kNone) return status;
  return reroute_tokens(
      topk_ids.data(), static_cast<int64_t>(topk_ids.size()), topology.num_experts,
      load.data() + static_cast<int64_t>(rank) * topology.num_experts, scratch, out.data());
}

template <typename Id>
void bind_ids(nb::module_& m) {
  m.def("reroute", &reroute<Id>, nb::arg("topk_ids").noconvert(), nb::arg("load").noconvert(),
        nb::arg("slot_expert").noconvert(), nb::arg("slot_quota").noconvert(),
        nb::arg("home_quota").noconvert(), nb::arg("home").noconvert(), nb::arg("rank"),
        nb::arg("out").noconvert(),
        "Writes physical instance ids to `out`; the status says what was wrong, if anything.");
}

}  // namespace

void bind_reroute(nb::module_& m) {
  nb::enum_<RerouteFault>(m, "RerouteFault")
      .value("NONE", RerouteFault::kNone)
      .value("BAD_COUNT", RerouteFault::kBadCount)
      .value("BAD_SLOT", RerouteFault::kBadSlot)
      .value("QUOTA_MISMATCH", RerouteFault::kQuotaMismatch)
      .value("ID_OUT_OF_RANGE", RerouteFault::kIdOutOfRange)
      .value("COUNT_MISMATCH", RerouteFault::kCountMismatch);
  nb::class_<RerouteStatus>(m, "RerouteStatus")
      .def_ro("fault", &RerouteStatus::fault)
      .def_ro("expert", &RerouteStatus::expert)
      .def_ro("counted", &RerouteStatus::counted)
      .def_ro("expected", &RerouteStatus::expected)
      .def_ro("position", &RerouteStatus::position)
      .def_ro("value", &RerouteStatus::value);
  bind_ids<int32_t>(m);
  bind_ids<int64_t>(m);
}

}  // namespace uec::python
