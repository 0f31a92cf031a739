# Installs the library, the headers, the command, and the files by which CMake and pkg-config find it.
include(GNUInstallDirs)
include(CMakePackageConfigHelpers)

set(package_dir ${CMAKE_INSTALL_LIBDIR}/cmake/octet)
install(TARGETS octet EXPORT octetTargets LIBRARY DESTINATION ${CMAKE_INSTALL_LIBDIR})
install(FILES include/octet/octet.h include/octet/octet_study.h include/octet/octet.hpp include/octet/formats.hpp
        DESTINATION ${CMAKE_INSTALL_INCLUDEDIR}/octet)
install(FILES LICENSE DESTINATION ${CMAKE_INSTALL_DOCDIR})
install(EXPORT octetTargets NAMESPACE octet:: FILE octetConfig.cmake DESTINATION ${package_dir})

# Before 1.0 a minor version may change the ABI.
write_basic_package_version_file(${PROJECT_BINARY_DIR}/octetConfigVersion.cmake COMPATIBILITY SameMinorVersion)
file(RELATIVE_PATH to_prefix /${CMAKE_INSTALL_LIBDIR}/pkgconfig /)
configure_file(cmake/octet.pc.in ${PROJECT_BINARY_DIR}/octet.pc @ONLY)
install(FILES ${PROJECT_BINARY_DIR}/octetConfigVersion.cmake DESTINATION ${package_dir})
install(FILES ${PROJECT_BINARY_DIR}/octet.pc DESTINATION ${CMAKE_INSTALL_LIBDIR}/pkgconfig)

if(OCTET_CLI)
  file(RELATIVE_PATH to_library /${CMAKE_INSTALL_BINDIR} /${CMAKE_INSTALL_LIBDIR})
  set_target_properties(octet_cli PROPERTIES INSTALL_RPATH "$ORIGIN/${to_library}")
  install(TARGETS octet_cli RUNTIME DESTINATION ${CMAKE_INSTALL_BINDIR})
endif()
