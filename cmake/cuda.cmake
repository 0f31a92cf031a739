# Decides whether the CUDA backends are built, and says so: here, in octet_info, and wherever a CUDA tensor is rejected.
# Sets OCTET_CUDA_BUILT and OCTET_CUDA_SUMMARY.
if(NOT OCTET_CUDA MATCHES "^(AUTO|ON|OFF)$")
  message(FATAL_ERROR "OCTET_CUDA is ${OCTET_CUDA}; allowed: AUTO, ON, OFF")
endif()

find_program(OCTET_NVCC nvcc HINTS ENV CUDACXX ENV CUDA_PATH ENV CUDA_HOME PATHS /usr/local/cuda
             ${PROJECT_SOURCE_DIR}/.venv/cuda PATH_SUFFIXES bin)

if(OCTET_CUDA STREQUAL "OFF")
  set(reason "it was built with OCTET_CUDA=OFF")
elseif(NOT OCTET_NVCC)
  set(reason "no nvcc was found when it was built (PATH, CUDACXX, CUDA_PATH, /usr/local/cuda, .venv/cuda)")
elseif(OCTET_SANITIZE)
  set(reason "it was built with sanitizers (OCTET_SANITIZE)")
endif()
if(OCTET_CUDA STREQUAL "ON" AND reason)
  message(FATAL_ERROR "OCTET_CUDA=ON, but ${reason}; use OCTET_CUDA=AUTO or OFF for a build that runs on the CPU only")
endif()

if(reason)
  set(OCTET_CUDA_BUILT OFF)
  set(OCTET_CUDA_SUMMARY "CPU only: ${reason}")
else()
  set(OCTET_CUDA_BUILT ON)
  set(OCTET_CUDA_SUMMARY "CUDA with ${OCTET_NVCC}")
  # "90a-real": machine code for compute capability 9.0 alone, with the instructions that only it has (wgmma).
  set(CMAKE_CUDA_ARCHITECTURES 90a-real)
  # Code for all other GPUs: machine code of 8.0 runs on 8.6 and 8.9, too, and PTX of 8.0 on every later GPU.
  set(OCTET_CUDA_ARCHITECTURES "80-real;90-real;80-virtual" CACHE STRING
      "Architectures of the general CUDA kernels, as in CMAKE_CUDA_ARCHITECTURES; 100-real adds B200 and B300, 120-real RTX 50")
  set(CMAKE_CUDA_COMPILER ${OCTET_NVCC})
  set(CMAKE_CUDA_STANDARD 17)
  enable_language(CUDA)
  # CMake 3.25 does not know nvcc's flag for C++20, nor that it has it.
  set(CMAKE_CUDA20_STANDARD_COMPILE_OPTION -std=c++20)
  set(CMAKE_CUDA20_EXTENSION_COMPILE_OPTION -std=c++20)
  set(CMAKE_CUDA_STANDARD 20)
  # Where 3.25 is required, CMake 3.25 marks CUDA::nvToolsExt as deprecated even if the toolkit no longer has it, and fails.
  set(required ${CMAKE_MINIMUM_REQUIRED_VERSION})
  set(CMAKE_MINIMUM_REQUIRED_VERSION 3.24)
  find_package(CUDAToolkit 12.8 REQUIRED)
  set(CMAKE_MINIMUM_REQUIRED_VERSION ${required})
endif()
message(STATUS "octet: ${OCTET_CUDA_SUMMARY}")
