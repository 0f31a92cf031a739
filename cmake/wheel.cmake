# The library of a Python wheel: beside the Python files, under one name (a wheel holds no links), and with the C++
# runtime inside, as the wheel meets C libraries and processes of all kinds.
install(TARGETS octet LIBRARY DESTINATION octet)
set_property(TARGET octet PROPERTY VERSION)
set_property(TARGET octet PROPERTY SOVERSION)
target_link_options(octet PRIVATE -static-libstdc++ -static-libgcc)
foreach(caller octet_dlpack octet_jax)
  if(TARGET ${caller})
    install(TARGETS ${caller} LIBRARY DESTINATION octet)
    target_link_options(${caller} PRIVATE -static-libstdc++ -static-libgcc)
  endif()
endforeach()
