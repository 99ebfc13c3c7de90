#include "bind.hpp"

namespace uec::python {

void bind_planner(nanobind::module_&) {}

}  // namespace uec::python
