#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/vector.h>

#include <cstring>
#include <optional>

#include "arrays.hpp"
#include "bind.hpp"
#include "core/plan/check.hpp"
#include "model/transfer.hpp"
#include "modes.hpp"
#include "unlocked.hpp"

namespace nb = nanobind;
using namespace nb::literals;

namespace uec::python {
namespace {

using Ints = std::vector<int32_t>;

// ultraep_comm.model checks user input; these checks only prevent undefined behaviour.
model::Machine make_machine(const std::vector<double>& rates, const std::vector<int64_t>& times,
                            const Ints& counts, const std::vector<double>& cores) {
  require_equal("length of rates", rates.size(), 9);
  require_equal("length of times", times.size(), 14);
  require_equal("length of counts", counts.size(), 4);
  require_equal("length of cores", cores.size(), 2);
  if (!(cores[0] >= 0 && cores[0] <= 1 && cores[1] >= 0 && cores[1] < 1e9))
    throw nb::value_error("cores has a value out of range");
  if (rates[8] > 1) throw nb::value_error("rates has a value out of range");
  for (const double rate : rates)
    if (!(rate > 0 && rate < 2e9)) throw nb::value_error("rates has a value out of range");
  for (const int64_t time : times)
    if (time < 0 || time > int64_t{1} << 50) reject("times", time, "0 to 2**50");
  if (counts[0] < 0) reject("counts[0], domain_size,", counts[0], "0 or more");
  for (const int32_t i : {1, 2})
    if (counts[i] < 1 || counts[i] > 1024)
      reject("counts[" + std::to_string(i) + "]", counts[i], "1 to 1024");
  model::Machine m;
  m.store = {rates[0], rates[1]};
  m.load = {rates[2], rates[3]};
  m.far_store = {rates[4], rates[5]};
  m.far_load = {rates[6], rates[7]};
  m.unloaded = rates[8];
  m.store_ps = times[0];
  m.flag_ps = times[1];
  m.load_ps = times[2];
  m.far_ps = times[3];
  m.group_ps = times[4];
  m.call_ps = times[5];
  m.finish_ps = times[6];
  m.poll_ps = times[7];
  m.fetch_ps = times[8];
  m.store_ps_of_tile = times[9];
  m.publish_ps = times[10];
  m.gather_ps = times[11];
  m.add_ps = times[12];
  m.clear_ps = times[13];
  m.shared = cores[0];
  m.read = cores[1];
  m.domain_size = counts[0];
  m.workers = counts[1];
  m.stages = counts[2];
  m.fair = counts[3] != 0;
  return m;
}

void check_transfer(const model::Transfer& transfer, size_t num_slots) {
  const Topology& t = transfer.topology;
  if (t.num_ranks < 1 || t.num_ranks > 1024) reject("num_ranks", t.num_ranks, "1 to 1024");
  if (t.slots_per_rank < 0) reject("slots_per_rank", t.slots_per_rank, "0 or more");
  require_homes(t);
  require_equal("length of slot_expert", num_slots, int64_t{t.num_ranks} * t.slots_per_rank);
  if (check_plan(SingleThread{}, t, transfer.slot_expert).fault != PlanFault::kNone)
    throw nb::value_error("the plan is not legal on this topology");
  if (transfer.tile_bytes < 1 || transfer.tile_bytes > 1 << 30)
    reject("tile_bytes", transfer.tile_bytes, "1 to 2**30");
  int64_t num_tiles = 0;
  for (const int64_t bytes : transfer.segment_bytes) {
    if (bytes < 0 || bytes > int64_t{1} << 36) reject("segment_bytes", bytes, "0 to 2**36");
    num_tiles += ceil_div(bytes, transfer.tile_bytes);
    if (num_tiles > 1 << 22) reject("number of tiles", num_tiles, "at most 2**22");
  }
  if (transfer.chunk_tiles < 1) reject("chunk_tiles", transfer.chunk_tiles, "1 or more");
  const auto replicas =
      num_slots - std::count(transfer.slot_expert, transfer.slot_expert + num_slots, -1);
  if (!transfer.parent.empty()) require_equal("length of parent", transfer.parent.size(), replicas);
  for (const int32_t rank : transfer.parent)
    if (rank < 0 || rank >= t.num_ranks) reject("parent", rank, "a rank");
  if (transfer.resident != nullptr && (transfer.reduces() || !transfer.parent.empty()))
    throw nb::value_error("resident is given; expected None with parent or grad_types");
}

template <typename T>
nb::object array_of(const std::vector<T>& from, std::initializer_list<size_t> shape) {
  auto data = std::make_unique<T[]>(from.size());
  std::copy(from.begin(), from.end(), data.get());
  return nb::cast(to_numpy(std::move(data), shape));
}

// Columns of the spans: integers [N, 6] (rank, kind, peer, expert, piece, bytes), times [N, 2].
using Fields = nb::typed<nb::dict, nb::str, nb::any>;

void add_spans(Fields& d, const std::vector<model::Span>& spans) {
  std::vector<int64_t> what, when;
  for (const model::Span& s : spans) {
    what.insert(what.end(),
                {s.rank, static_cast<int64_t>(s.kind), s.peer, s.expert, s.piece, s.bytes});
    when.insert(when.end(), {s.begin, s.end});
  }
  d["spans"] = array_of(what, {spans.size(), 6});
  d["span_ps"] = array_of(when, {spans.size(), 2});
}

Fields model_transfer(const Ints& slot_expert, const Ints& home, int32_t num_ranks,
                      const std::vector<int64_t>& segment_bytes, int64_t tile_bytes, GivenMode mode,
                      bool may_pull, const std::vector<int64_t>& cost,
                      const std::vector<double>& rates, const std::vector<int64_t>& times,
                      const Ints& counts, const std::vector<double>& cores, bool timeline,
                      const Ints& parent, int32_t chunk_tiles, const Ints& grad_types, bool zero,
                      const std::optional<Ints>& resident) {
  if (num_ranks < 1) reject("num_ranks", num_ranks, "at least 1");
  require_equal("length of cost", cost.size(), 5);
  // Relays go from rank to rank wherever these are.
  Ints domain(num_ranks);
  if (parent.empty() && !counts.empty() && counts[0] > 0)
    for (int32_t r = 0; r < num_ranks; ++r) domain[r] = r / counts[0];
  model::Transfer transfer;
  transfer.topology = {num_ranks,
                       static_cast<int32_t>(home.size()),
                       static_cast<int32_t>(slot_expert.size() / num_ranks),
                       home.data(),
                       domain.data(),
                       true};
  transfer.slot_expert = slot_expert.data();
  if (resident) {
    require_equal("length of resident", resident->size(), slot_expert.size());
    transfer.resident = resident->data();
  }
  transfer.segment_bytes = segment_bytes;
  transfer.tile_bytes = tile_bytes;
  transfer.mode = number_of(mode);
  transfer.may_pull = may_pull;
  transfer.cost = {cost[0], cost[1], cost[2], cost[3], cost[4]};
  transfer.parent = parent;
  transfer.chunk_tiles = chunk_tiles;
  for (const int32_t type : grad_types) {
    if (type < 0 || type > 1) reject("grad_types", type, "0 or 1");
    transfer.grad_type.push_back(static_cast<GradType>(type));
  }
  if (transfer.reduces())
    require_equal("length of grad_types", grad_types.size(), segment_bytes.size());
  transfer.zero = zero;
  check_transfer(transfer, slot_expert.size());
  const model::Machine machine = make_machine(rates, times, counts, cores);
  model::Result result;
  {
    const Unlocked unlocked;
    result = model::model_transfer(transfer, machine, timeline);
  }
  const auto ranks = static_cast<size_t>(num_ranks);
  const model::Outcome& found = result.outcome;
  Fields d;
  d["mode"] = result.mode;
  d["finish_ps"] = array_of(found.finish, {ranks});
  d["egress_ps"] = array_of(found.egress_busy, {ranks});
  d["ingress_ps"] = array_of(found.ingress_busy, {ranks});
  d["sent"] = array_of(found.sent, {ranks});
  d["received"] = array_of(found.received, {ranks, slot_expert.size() / ranks});
  if (timeline) add_spans(d, found.spans);
  return d;
}

}  // namespace

void bind_model(nb::module_& m) {
  m.def("model_transfer", &model_transfer, "slot_expert"_a, "home"_a, "num_ranks"_a,
        "segment_bytes"_a, "tile_bytes"_a, "mode"_a.none(), "may_pull"_a, "cost"_a, "rates"_a,
        "times"_a, "counts"_a, "cores"_a, "timeline"_a, "parent"_a, "chunk_tiles"_a, "grad_types"_a,
        "zero"_a, "resident"_a = nb::none(),
        "See src/model. RuntimeError: the transfer does not finish.");
}

}  // namespace uec::python
