# `find_package(ultraep_comm)` provides ultraep_comm::core, ultraep_comm::engine, ultraep_comm::host,
# ultraep_comm::c10d and ultraep_comm::cuda_host and, if cubins were built, their folder in ultraep_comm_CUBIN_DIR.
include(CMakePackageConfigHelpers)

install(TARGETS ultraep_core ultraep_engine ultraep_host ultraep_c10d ultraep_cuda_host EXPORT ultraep_comm COMPONENT dev
  ARCHIVE DESTINATION ${CMAKE_INSTALL_LIBDIR})
install(DIRECTORY src/core src/engine src/host src/c10d src/cuda COMPONENT dev
  DESTINATION ${CMAKE_INSTALL_INCLUDEDIR}/ultraep_comm FILES_MATCHING PATTERN "*.hpp"
  PATTERN "ready.cuh" PATTERN "ptx.cuh")
install(EXPORT ultraep_comm NAMESPACE ultraep_comm:: FILE ultraep_comm-targets.cmake COMPONENT dev
  DESTINATION ${CMAKE_INSTALL_LIBDIR}/cmake/ultraep_comm)
configure_package_config_file(cmake/ultraep_comm-config.cmake.in ultraep_comm-config.cmake
  INSTALL_DESTINATION ${CMAKE_INSTALL_LIBDIR}/cmake/ultraep_comm PATH_VARS CMAKE_INSTALL_DATADIR)
write_basic_package_version_file(ultraep_comm-config-version.cmake COMPATIBILITY SameMinorVersion)
install(FILES ${CMAKE_CURRENT_BINARY_DIR}/ultraep_comm-config.cmake
  ${CMAKE_CURRENT_BINARY_DIR}/ultraep_comm-config-version.cmake
  COMPONENT dev DESTINATION ${CMAKE_INSTALL_LIBDIR}/cmake/ultraep_comm)
