# The libraries of a Python wheel: beside the Python files, under one name each (a wheel holds no links). The C++ runtime
# is the system's: inside, it would ask for a newer glibc than octet does (arc4random of 2.36).
set_property(TARGET octet PROPERTY VERSION)
set_property(TARGET octet PROPERTY SOVERSION)
foreach(target octet octet_dlpack octet_jax)
  if(TARGET ${target})
    install(TARGETS ${target} LIBRARY DESTINATION octet)
  endif()
endforeach()
# octet/_command.py runs the command.
if(TARGET octet_cli)
  set_target_properties(octet_cli PROPERTIES INSTALL_RPATH "\$ORIGIN/..")
  install(TARGETS octet_cli RUNTIME DESTINATION octet/bin)
endif()
