#include "health.hpp"

#include <nanobind/nanobind.h>
#include <nanobind/stl/array.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <chrono>

#include "bind.hpp"

namespace nb = nanobind;
using namespace nb::literals;

namespace uec::python {
namespace {

using host::Damage;

double seconds(std::chrono::nanoseconds time) {
  return std::chrono::duration<double>(time).count();
}

}  // namespace

void bind_health(nb::module_& m) {
  nb::class_<PeerState>(m, "PeerState", "What a rank last published about itself.")
      .def(
          "__init__",
          [](PeerState* self, RecordKind kind, uint64_t epoch, uint64_t failed_epoch,
             int32_t waited_for, int32_t aborted_by, bool gone, bool reachable) {
            new (self)
                PeerState{kind, epoch, failed_epoch, waited_for, aborted_by, gone, reachable};
          },
          nb::kw_only(), "kind"_a, "epoch"_a, "failed_epoch"_a = 0, "waited_for"_a = -1,
          "aborted_by"_a = -1, "gone"_a = false, "reachable"_a = true)
      .def_ro("kind", &PeerState::kind)
      .def_ro("epoch", &PeerState::epoch)
      .def_ro("failed_epoch", &PeerState::failed_epoch)
      .def_ro("waited_for", &PeerState::waited_for)
      .def_ro("aborted_by", &PeerState::aborted_by)
      .def_ro("gone", &PeerState::gone)
      .def_ro("reachable", &PeerState::reachable);

  nb::class_<Damage>(m, "Damage", "What check mode found wrong; see src/host/slot_check.hpp.")
      .def_ro("kind", &Damage::kind)
      .def_ro("home", &Damage::home)
      .def_ro("expert", &Damage::expert)
      .def_ro("slot", &Damage::slot)
      .def_ro("segment", &Damage::segment)
      .def_ro("offset", &Damage::offset)
      .def_ro("found", &Damage::found)
      .def_ro("expected", &Damage::expected)
      .def_ro("source_changed", &Damage::source_changed);

  nb::class_<FullReport>(m, "Report", "How a call failed; see src/core/transfer/failure.hpp.")
      .def(
          "__init__",
          [](FullReport* self, Fault fault, uint64_t epoch, FlagKind flag, int32_t peer,
             int32_t expert, int32_t piece, uint64_t seen, uint64_t expected, int32_t aborter,
             int32_t root, double waited, bool all_called, std::string detail) {
            new (self) FullReport{};
            self->fault = fault;
            self->epoch = epoch;
            self->wait.flag = flag;
            self->wait.peer = peer;
            self->wait.expert = expert;
            self->wait.piece = piece;
            self->wait.seen = seen;
            self->wait.expected = expected;
            self->aborter = aborter;
            self->root = root;
            self->seconds = waited;
            self->all_called = all_called;
            self->detail = std::move(detail);
          },
          nb::kw_only(), "fault"_a, "epoch"_a, "flag"_a = FlagKind::kCall, "peer"_a = -1,
          "expert"_a = -1, "piece"_a = -1, "seen"_a = 0, "expected"_a = 0, "aborter"_a = -1,
          "root"_a = -1, "seconds"_a = 0.0, "all_called"_a = false, "detail"_a = "")
      .def_ro("fault", &FullReport::fault)
      .def_prop_ro("flag", [](const FullReport& r) { return r.wait.flag; })
      .def_prop_ro("peer", [](const FullReport& r) { return r.wait.peer; })
      .def_prop_ro("expert", [](const FullReport& r) { return r.wait.expert; })
      .def_prop_ro("piece", [](const FullReport& r) { return r.wait.piece; })
      .def_prop_ro("seen", [](const FullReport& r) { return r.wait.seen; })
      .def_prop_ro("expected", [](const FullReport& r) { return r.wait.expected; })
      .def_ro("aborter", &FullReport::aborter)
      .def_ro("root", &FullReport::root)
      .def_ro("epoch", &FullReport::epoch)
      .def_ro("seconds", &FullReport::seconds)
      .def_ro("all_called", &FullReport::all_called)
      .def_ro("detail", &FullReport::detail)
      .def_ro("bad_id", &FullReport::bad_id)
      .def_ro("damage", &FullReport::damage)
      .def_ro("peers", &FullReport::peers);

  nb::class_<Waits>(m, "Waits", "How long workers slept in waits; see src/engine/health.hpp.")
      .def_prop_ro("seconds", [](const Waits& w) { return seconds(w.total); })
      .def_ro("longer", &Waits::longer)
      .def_prop_ro("longest", [](const Waits& w) { return seconds(w.longest); })
      .def_prop_ro("flag", [](const Waits& w) { return w.longest_for.flag; })
      .def_prop_ro("peer", [](const Waits& w) { return w.longest_for.peer; })
      .def_prop_ro("expert", [](const Waits& w) { return w.longest_for.expert; })
      .def_prop_ro("epoch", [](const Waits& w) { return w.longest_for.expected; });

  nb::class_<EngineHealth>(m, "EngineHealth", "What an engine has done so far.")
      .def(
          "__init__",
          [](EngineHealth* self, int64_t replicate, int64_t reduce, int64_t gather,
             int64_t rejected, uint64_t completed, int64_t bytes_stored) {
            new (self)
                EngineHealth{{replicate, reduce, gather, rejected}, completed, bytes_stored, {}};
          },
          nb::kw_only(), "replicate"_a, "reduce"_a, "gather"_a, "rejected"_a, "completed"_a,
          "bytes_stored"_a)
      .def_prop_ro("replicate", [](const EngineHealth& h) { return h.calls.replicate; })
      .def_prop_ro("reduce", [](const EngineHealth& h) { return h.calls.reduce; })
      .def_prop_ro("gather", [](const EngineHealth& h) { return h.calls.gather; })
      .def_prop_ro("rejected", [](const EngineHealth& h) { return h.calls.rejected; })
      .def_ro("completed", &EngineHealth::completed)
      .def_ro("bytes_stored", &EngineHealth::bytes_stored)
      .def_ro("waits", &EngineHealth::waits);
}

}  // namespace uec::python
