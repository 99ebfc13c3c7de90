// One function for each bound part; module.cc calls them in the order of the data flow.
#pragma once

#include <nanobind/nanobind.h>

namespace uec::python {

void bind_enums(nanobind::module_& m);
void bind_planner(nanobind::module_& m);
void bind_reroute(nanobind::module_& m);
void bind_schedule(nanobind::module_& m);
void bind_model(nanobind::module_& m);
void bind_memory(nanobind::module_& m);
void bind_health(nanobind::module_& m);
void bind_engine(nanobind::module_& m);
void bind_c10d(nanobind::module_& m);
void bind_cuda(nanobind::module_& m);
void bind_cuda_stages(nanobind::module_& m);
void bind_ending(nanobind::module_& m);

}  // namespace uec::python
