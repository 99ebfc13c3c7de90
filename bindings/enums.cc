// Enumerations; arithmetic if arrays or files store their numbers.
#include "bind.hpp"
#include "core/plan/check.hpp"
#include "core/reroute/reroute.hpp"
#include "core/schedule/schedule.hpp"
#include "core/transfer/gradients.hpp"
#include "core/transfer/protocol.hpp"
#include "cuda/device/args.hpp"
#include "engine/health.hpp"
#include "host/slot_check.hpp"

namespace nb = nanobind;

namespace uec::python {

void bind_enums(nb::module_& m) {
  nb::enum_<Operation>(m, "Operation")
      .value("REPLICATE", Operation::kReplicate)
      .value("GATHER", Operation::kGather)
      .value("REDUCE", Operation::kReduce);
  nb::enum_<Mode>(m, "Mode", nb::is_arithmetic())
      .value("PUSH", Mode::kPush)
      .value("PULL", Mode::kPull)
      .value("DIRECT", Mode::kDirect);
  nb::enum_<GradType>(m, "GradType", nb::is_arithmetic())
      .value("FLOAT32", GradType::kFloat32)
      .value("BFLOAT16", GradType::kBFloat16);
  nb::enum_<PlanFault>(m, "PlanFault")
      .value("NONE", PlanFault::kNone)
      .value("OUT_OF_RANGE", PlanFault::kOutOfRange)
      .value("ON_HOME", PlanFault::kOnHome)
      .value("DUPLICATE", PlanFault::kDuplicate)
      .value("OUT_OF_DOMAIN", PlanFault::kOutOfDomain);
  nb::enum_<cuda::Refusal>(m, "Refusal")
      .value("HOME", cuda::Refusal::kHome)
      .value("WEIGHTS", cuda::Refusal::kWeights);
  nb::enum_<cuda::LoadFault>(m, "LoadFault")
      .value("NONE", cuda::LoadFault::kNone)
      .value("NEGATIVE", cuda::LoadFault::kNegative)
      .value("TOO_MANY", cuda::LoadFault::kTooMany)
      .value("TOO_MANY_IN_ALL", cuda::LoadFault::kTooManyInAll);
  nb::enum_<RerouteFault>(m, "RerouteFault")
      .value("NONE", RerouteFault::kNone)
      .value("BAD_COUNT", RerouteFault::kBadCount)
      .value("BAD_SLOT", RerouteFault::kBadSlot)
      .value("QUOTA_MISMATCH", RerouteFault::kQuotaMismatch)
      .value("ID_OUT_OF_RANGE", RerouteFault::kIdOutOfRange)
      .value("COUNT_MISMATCH", RerouteFault::kCountMismatch)
      .value("OTHER_HOME", RerouteFault::kOtherHome);
  nb::enum_<Fault>(m, "Fault")
      .value("NONE", Fault::kNone)
      .value("MISMATCH", Fault::kMismatch)
      .value("REJECTED", Fault::kRejected)
      .value("CLOSED", Fault::kClosed)
      .value("GONE", Fault::kGone)
      .value("ABORTED", Fault::kAborted)
      .value("TIMEOUT", Fault::kTimeout)
      .value("CANCELLED", Fault::kCancelled)
      .value("DAMAGED", Fault::kDamaged);
  nb::enum_<FlagKind>(m, "FlagKind")
      .value("CALL", FlagKind::kCall)
      .value("OPEN", FlagKind::kOpen)
      .value("READY", FlagKind::kReady)
      .value("DONE", FlagKind::kDone)
      .value("PULLED", FlagKind::kPulled)
      .value("GATHERED", FlagKind::kGathered)
      .value("SUMMED", FlagKind::kSummed)
      .value("CONSUMED", FlagKind::kConsumed)
      .value("CHECKED", FlagKind::kChecked);
  nb::enum_<RecordKind>(m, "RecordKind")
      .value("CALL", RecordKind::kCall)
      .value("REJECTED", RecordKind::kRejected)
      .value("CLOSED", RecordKind::kClosed);
  nb::enum_<host::Damage::Kind>(m, "DamageKind")
      .value("NONE", host::Damage::kNone)
      .value("SLOT", host::Damage::kSlot)
      .value("UNTOUCHED", host::Damage::kUntouched)
      .value("SOURCE", host::Damage::kSource)
      .value("RESIDENT", host::Damage::kResident);
}

}  // namespace uec::python
