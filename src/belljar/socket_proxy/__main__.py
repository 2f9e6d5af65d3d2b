from belljar.socket_proxy.command import main

main()
