# Finds a CUDA compiler, its headers and its static runtime. Sets:
#   JAXFERRY_NVCC            the compiler: this variable's value, the system's compiler, or that of the PyPI package
#                            nvidia-cuda-nvcc (with nvidia-nvvm, nvidia-cuda-crt and nvidia-cuda-runtime)
#   JAXFERRY_NVCC_VERSION    for example 13.0.88
#   JAXFERRY_CUDA_INCLUDE    the folder of cuda_runtime_api.h
#   JAXFERRY_CUDART          libcudart_static.a
#   JAXFERRY_CUDA_ARCHITECTURES  numbers to compile for; default: the environment variable of that name, or those of
#                                80, 90, 120 that the compiler supports
set(JAXFERRY_NVCC "" CACHE FILEPATH "The CUDA compiler; by default the system's, else the PyPI package's")
set(JAXFERRY_CUDA_ARCHITECTURES "$ENV{JAXFERRY_CUDA_ARCHITECTURES}" CACHE STRING "Architectures to compile for, such as 80;90; by default 80;90;120")

# Package folders: that of the building Python, and the one that holds the FFI headers' jaxlib.
function(jaxferry_find_site_packages result)
  set(folders "")
  if(Python_EXECUTABLE)
    execute_process(
      COMMAND "${Python_EXECUTABLE}" -c
              "import sys; print(';'.join(p for p in sys.path if p.endswith('-packages')), end='')"
      OUTPUT_VARIABLE folders ERROR_QUIET)
  endif()
  if(JAXFERRY_FFI_INCLUDE)
    get_filename_component(folder "${JAXFERRY_FFI_INCLUDE}/../.." ABSOLUTE)
    list(APPEND folders "${folder}")
  endif()
  set(${result} "${folders}" PARENT_SCOPE)
endfunction()

if(NOT JAXFERRY_NVCC)
  find_program(found_nvcc nvcc HINTS ENV CUDA_HOME ENV CUDA_PATH PATHS /usr/local/cuda PATH_SUFFIXES bin NO_CACHE)
  if(NOT found_nvcc)
    jaxferry_find_site_packages(folders)
    foreach(folder IN LISTS folders)
      file(GLOB candidates "${folder}/nvidia/cu*/bin/nvcc" "${folder}/nvidia/cuda_nvcc/bin/nvcc")
      if(candidates)
        list(GET candidates 0 found_nvcc)
        break()
      endif()
    endforeach()
  endif()
  if(NOT found_nvcc)
    message(FATAL_ERROR "no CUDA compiler was found: install CUDA, or `pip install nvidia-cuda-nvcc nvidia-nvvm "
                        "nvidia-cuda-crt nvidia-cuda-runtime`, or name an nvcc by -DJAXFERRY_NVCC")
  endif()
  set(JAXFERRY_NVCC "${found_nvcc}" CACHE FILEPATH "The CUDA compiler" FORCE)
endif()

execute_process(
  COMMAND "${JAXFERRY_NVCC}" --version
  OUTPUT_VARIABLE output ERROR_VARIABLE output RESULT_VARIABLE status)
if(NOT status EQUAL 0 OR NOT output MATCHES "V([0-9]+\\.[0-9]+\\.[0-9]+)")
  message(FATAL_ERROR "${JAXFERRY_NVCC} does not run as a CUDA compiler: ${output}")
endif()
set(JAXFERRY_NVCC_VERSION "${CMAKE_MATCH_1}")
if(JAXFERRY_NVCC_VERSION VERSION_LESS 12)
  message(FATAL_ERROR "${JAXFERRY_NVCC} is version ${JAXFERRY_NVCC_VERSION}; 12 or later is needed")
endif()

# Asks the compiler for its parts, since a wrapper's own folder does not contain them.
file(WRITE "${CMAKE_CURRENT_BINARY_DIR}/empty.cu" "")
execute_process(
  COMMAND "${JAXFERRY_NVCC}" --dryrun -c "${CMAKE_CURRENT_BINARY_DIR}/empty.cu" -o "${CMAKE_CURRENT_BINARY_DIR}/empty.o"
  OUTPUT_VARIABLE output ERROR_VARIABLE output)
if(NOT output MATCHES "TOP=([^\n]+)")
  message(FATAL_ERROR "${JAXFERRY_NVCC} --dryrun does not say where its headers are: ${output}")
endif()
string(STRIP "${CMAKE_MATCH_1}" top)
get_filename_component(top "${top}" REALPATH)
# Older packages have one folder per part, side by side.
find_path(JAXFERRY_CUDA_INCLUDE cuda_runtime_api.h
          PATHS "${top}" "${top}/../cuda_runtime" PATH_SUFFIXES include NO_DEFAULT_PATH NO_CACHE)
find_library(JAXFERRY_CUDART libcudart_static.a
             PATHS "${top}" "${top}/../cuda_runtime"
             PATH_SUFFIXES lib64 lib targets/x86_64-linux/lib targets/sbsa-linux/lib NO_DEFAULT_PATH NO_CACHE)
if(NOT JAXFERRY_CUDA_INCLUDE OR NOT JAXFERRY_CUDART)
  message(FATAL_ERROR "${top} lacks cuda_runtime_api.h or libcudart_static.a: install the CUDA runtime's development "
                      "files, or `pip install nvidia-cuda-runtime`")
endif()

execute_process(COMMAND "${JAXFERRY_NVCC}" --list-gpu-code OUTPUT_VARIABLE known_architectures)
set(architectures "${JAXFERRY_CUDA_ARCHITECTURES}")
if(NOT architectures)
  foreach(architecture IN ITEMS 80 90 120)
    if(known_architectures MATCHES "sm_${architecture}[ \n]")
      list(APPEND architectures ${architecture})
    endif()
  endforeach()
endif()
set(JAXFERRY_CUDA_ARCHITECTURES "${architectures}")
message(STATUS "nvcc ${JAXFERRY_NVCC_VERSION}: ${JAXFERRY_NVCC}, for architectures ${JAXFERRY_CUDA_ARCHITECTURES}")
