# OCTET_CLI=AUTO becomes ON where all that the command is built of is found, else OFF.
set(OCTET_CLI ON)
foreach(package CLI11 nlohmann_json fmt)
  find_package(${package} QUIET)
  if(NOT ${package}_FOUND)
    message(WARNING "octet: no command, as ${package} was not found")
    set(OCTET_CLI OFF)
  endif()
endforeach()
