#include <nanobind/stl/pair.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <cstring>

#include "arrays.hpp"
#include "bind.hpp"
#include "c10d/ledger.hpp"
#include "calls.hpp"

namespace nb = nanobind;
using namespace nb::literals;

namespace uec::python {
namespace {

using c10d::Ledger;
using c10d::Prepared;
using c10d::Step;
using c10d::StepKind;

static_assert(sizeof(Step) == sizeof(int64_t) * 13);

// (epoch, digest, mode, is_empty, steps as int64 [N, 13]).
auto to_tuple(const Prepared& p) {
  constexpr size_t kFields = 13;
  auto steps = std::make_unique_for_overwrite<int64_t[]>(p.steps.size() * kFields);
  int64_t* to = steps.get();
  for (const Step& s : p.steps) {
    const int64_t fields[] = {s.round,   static_cast<int64_t>(s.kind),
                              s.peer,    s.tag,
                              s.segment, s.offset,
                              s.bytes,   s.place,
                              s.expert,  s.chunk,
                              s.gate,    s.behind,
                              s.replica};
    to = std::copy(std::begin(fields), std::end(fields), to);
  }
  return std::make_tuple(p.epoch, p.digest, p.mode, p.is_empty,
                         to_numpy(std::move(steps), {p.steps.size(), kFields}));
}

}  // namespace

void bind_c10d(nb::module_& m) {
  nb::enum_<StepKind>(m, "C10dStep", nb::is_arithmetic())
      .value("SEND_MAIN", StepKind::kSendMain)
      .value("SEND_SLOT", StepKind::kSendSlot)
      .value("RECEIVE", StepKind::kReceive)
      .value("SEND_GRAD", StepKind::kSendGrad)
      .value("KEEP_GRAD", StepKind::kKeepGrad)
      .value("ADD_GRAD", StepKind::kAddGrad)
      .value("SEND_SUM", StepKind::kSendSum)
      .value("ADD_SUM", StepKind::kAddSum);

  nb::class_<Ledger>(m, "C10dLedger", "One rank's calls; see src/c10d/ledger.hpp.")
      .def(nb::init<EngineConfig>(), "config"_a)
      .def(
          "transfer",
          [](Ledger& l, const TransferCall& call) {
            return to_tuple(call.operation == Operation::kReduce
                                ? l.reduce(call.reduce_args(l.topology()))
                                : l.replicate(call.replicate_args(l.topology())));
          },
          "call"_a,
          "Returns (epoch, digest, mode, is_empty, steps): a row for each Step, by field.")
      .def("gather",
           [](Ledger& l) {
             const Prepared p = l.gather();
             return std::make_pair(p.epoch, p.digest);
           })
      .def("reject", &Ledger::reject)
      .def_prop_ro("epoch", &Ledger::epoch)
      .def(
          "residents",
          [](Ledger& l, int32_t bank) {
            return residents_array(l.topology(), l.banks().residents(bank));
          },
          "bank"_a)
      .def(
          "version", [](Ledger& l, int32_t bank) { return l.banks().version(bank); }, "bank"_a)
      .def(
          "last_call", [](Ledger& l, int32_t bank) { return l.banks().last_call(bank); }, "bank"_a)
      .def(
          "invalidate", [](Ledger& l, int32_t bank) { l.banks().invalidate(bank); }, "bank"_a)
      .def("slots_to_fill",
           [](const Ledger& l) { return slots_to_fill_array(l.topology(), l.slots_to_fill()); });
}

}  // namespace uec::python
