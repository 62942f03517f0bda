from moonvit.cli import main

main()
