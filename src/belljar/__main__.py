from belljar.cli.main import main

main()
