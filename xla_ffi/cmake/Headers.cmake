# Finds XLA's FFI headers and the version of their jaxlib.
if(NOT JAXFERRY_FFI_INCLUDE OR NOT JAXFERRY_JAXLIB)
  if(NOT Python_EXECUTABLE)
    find_package(Python REQUIRED COMPONENTS Interpreter)
  endif()
  # Uses jaxlib only: the build does not need jax.
  execute_process(
    COMMAND "${Python_EXECUTABLE}" -c
            "import os, jaxlib.version as v; print(os.path.join(os.path.dirname(v.__file__), 'include'), v.__version__, sep=';', end='')"
    OUTPUT_VARIABLE found
    RESULT_VARIABLE status)
  if(NOT status EQUAL 0)
    message(FATAL_ERROR "${Python_EXECUTABLE} has no jaxlib, whose headers are needed: install it, or name the headers' "
                        "folder by -DJAXFERRY_FFI_INCLUDE and the version by -DJAXFERRY_JAXLIB")
  endif()
  list(GET found 0 include)
  list(GET found 1 version)
  set(JAXFERRY_FFI_INCLUDE "${include}" CACHE PATH "Folder of XLA's FFI headers")
  set(JAXFERRY_JAXLIB "${version}" CACHE STRING "Version of the jaxlib whose headers these are")
endif()
if(NOT EXISTS "${JAXFERRY_FFI_INCLUDE}/xla/ffi/api/ffi.h")
  message(FATAL_ERROR "there is no xla/ffi/api/ffi.h in ${JAXFERRY_FFI_INCLUDE}")
endif()
message(STATUS "FFI headers of jaxlib ${JAXFERRY_JAXLIB}: ${JAXFERRY_FFI_INCLUDE}")
