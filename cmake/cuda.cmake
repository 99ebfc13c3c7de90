# Finds what the cubins need: nvcc, and NVSHMEM's headers and device library. Downloads nothing.
# Sets, in the caller's scope,
#
#   ULTRAEP_BUILD_CUBINS      whether to build them
#   ULTRAEP_NVCC              nvcc: $CUDACXX, $CUDA_HOME, PATH, the PyPI wheels, /usr/local/cuda
#   ULTRAEP_NVSHMEM_INCLUDE   NVSHMEM: NVSHMEM_HOME (a variable of CMake or of the environment), else
#   ULTRAEP_NVSHMEM_DEVICE    the PyPI wheel for nvcc's CUDA major, of the build or of Python_EXECUTABLE
#
# Results are not cached: a wheel from pip's build isolation is gone at the next configure.
set(ULTRAEP_CUDA AUTO CACHE STRING "Device kernels: AUTO (if nvcc and NVSHMEM are found), ON or OFF")
set_property(CACHE ULTRAEP_CUDA PROPERTY STRINGS AUTO ON OFF)
set(ULTRAEP_CUDA_ARCHS "90;100" CACHE STRING "Compute capabilities to build a cubin for, without the dot")

# Sets <out> to the folders of installed Python packages: Python's import path, then the site-packages
# of its environment, which build isolation hides.
function(_ultraep_python_packages out)
  find_package(Python 3.10 QUIET COMPONENTS Interpreter)
  set(folders "")
  if(Python_Interpreter_FOUND)
    execute_process(
      COMMAND ${Python_EXECUTABLE} -c
        "import sys, sysconfig as s; print(*sys.path[1:], *map(s.get_path, ('purelib', 'platlib')), sep=';')"
      OUTPUT_STRIP_TRAILING_WHITESPACE OUTPUT_VARIABLE folders COMMAND_ERROR_IS_FATAL ANY)
    list(REMOVE_ITEM folders "")
    list(REMOVE_DUPLICATES folders)
  endif()
  set(${out} ${folders} PARENT_SCOPE)
endfunction()

# Sets ULTRAEP_* as above, and <missing> to a description of what is missing.
function(_ultraep_find_cuda missing)
  set(${missing} "" PARENT_SCOPE)
  _ultraep_python_packages(packages)

  set(wheels ${packages})
  list(TRANSFORM wheels APPEND /nvidia/cu13/bin)
  if(DEFINED ENV{CUDACXX})
    set(nvcc $ENV{CUDACXX})
  else()
    find_program(nvcc nvcc NO_CACHE NO_CMAKE_SYSTEM_PATH HINTS ENV CUDA_HOME ENV CUDA_PATH PATH_SUFFIXES bin
      PATHS ${wheels} /usr/local/cuda/bin)
  endif()
  if(NOT nvcc)
    set(${missing} "no nvcc (set CUDACXX, or install the toolkit or its wheels)" PARENT_SCOPE)
    return()
  endif()
  execute_process(COMMAND ${nvcc} --version OUTPUT_VARIABLE version COMMAND_ERROR_IS_FATAL ANY)
  string(REGEX MATCH "release ([0-9]+)\\.([0-9]+)" version "${version}")
  set(major ${CMAKE_MATCH_1})
  set(version ${CMAKE_MATCH_1}.${CMAKE_MATCH_2})
  execute_process(COMMAND ${nvcc} --list-gpu-code OUTPUT_VARIABLE known COMMAND_ERROR_IS_FATAL ANY)
  foreach(arch IN LISTS ULTRAEP_CUDA_ARCHS)
    if(arch MATCHES "^[0-9][0-9]$" AND arch LESS 90)
      set(${missing} "the kernels need compute capability 9.0 (ULTRAEP_CUDA_ARCHS has ${arch})" PARENT_SCOPE)
      return()
    endif()
    if(NOT known MATCHES "sm_${arch}[ \r\n]")
      set(${missing} "nvcc ${version} does not know sm_${arch} (ULTRAEP_CUDA_ARCHS)" PARENT_SCOPE)
      return()
    endif()
  endforeach()

  if(DEFINED NVSHMEM_HOME)
    set(homes ${NVSHMEM_HOME})
  elseif(DEFINED ENV{NVSHMEM_HOME})
    set(homes $ENV{NVSHMEM_HOME})
  else()
    # The wheels for CUDA 12 and 13 install into the same folder; only their metadata differs.
    set(homes "")
    foreach(folder IN LISTS packages)
      file(GLOB metadata ${folder}/nvidia_nvshmem_cu${major}-*.dist-info)
      if(metadata)
        list(APPEND homes ${folder}/nvidia/nvshmem)
      endif()
    endforeach()
  endif()
  find_path(include nvshmem.h NO_CACHE NO_DEFAULT_PATH PATHS ${homes} PATH_SUFFIXES include)
  find_library(device libnvshmem_device.a NO_CACHE NO_DEFAULT_PATH PATHS ${homes}
    PATH_SUFFIXES lib lib64)
  if(NOT include OR NOT device)
    if(NOT homes)
      set(homes "the Python environment")
    endif()
    set(${missing} "no NVSHMEM headers and libnvshmem_device.a in ${homes} (set NVSHMEM_HOME, or \
install nvidia-nvshmem-cu${major})" PARENT_SCOPE)
    return()
  endif()

  set(ULTRAEP_NVCC ${nvcc} PARENT_SCOPE)
  set(ULTRAEP_NVCC_VERSION ${version} PARENT_SCOPE)
  set(ULTRAEP_NVSHMEM_INCLUDE ${include} PARENT_SCOPE)
  set(ULTRAEP_NVSHMEM_DEVICE ${device} PARENT_SCOPE)
endfunction()

set(ULTRAEP_BUILD_CUBINS OFF)
if(ULTRAEP_CUDA STREQUAL "AUTO" OR ULTRAEP_CUDA)
  _ultraep_find_cuda(_ultraep_missing)
  if(NOT _ultraep_missing)
    set(ULTRAEP_BUILD_CUBINS ON)
    message(STATUS "CUDA: cubins for ${ULTRAEP_CUDA_ARCHS} with nvcc ${ULTRAEP_NVCC_VERSION} "
      "(${ULTRAEP_NVCC}) and ${ULTRAEP_NVSHMEM_DEVICE}")
  elseif(ULTRAEP_CUDA STREQUAL "AUTO")
    message(STATUS "CUDA: no cubins: ${_ultraep_missing}")
  else()
    message(FATAL_ERROR "ULTRAEP_CUDA=${ULTRAEP_CUDA}: ${_ultraep_missing}")
  endif()
endif()
